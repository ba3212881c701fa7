"""The class `GradCache` of the package on PyPI cannot be imported: it imports `grad_cache`, the package is `gradcache`.

package: GradCache
case: value
"""

import importlib

has_class = hasattr(importlib.import_module("gradcache"), "GradCache")
print(f"gradcache has GradCache = {has_class}, right True")
