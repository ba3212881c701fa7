"""The README as PyPI shows it: its links are absolute where pyproject.toml has the project's address."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
readme = Path("README.md").read_text(encoding="utf-8")
address, tag = project.get("urls", {}).get("Source"), f"v{project['version']}"
if address:
    readme = re.sub(r"\]\((?!https?:|#)", f"]({address}/blob/{tag}/", readme)
    readme = re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{address}/raw/{tag}/', readme)
setup(long_description=readme, long_description_content_type="text/markdown")
