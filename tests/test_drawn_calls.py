import json
from pathlib import Path

from drawn_calls import main


def test_a_bit_that_differs_is_named(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    words = ["--count", "20", "--backend", "torch"]
    assert main([*words, "--bits", str(before)]) == 0
    assert main([*words, "--bits", str(after), "--against", str(before)]) == 0
    hashes = json.loads(before.read_text())
    hashes[next(name for name, value in hashes.items() if value)] = "another"
    before.write_text(json.dumps(hashes))
    assert main([*words, "--bits", str(after), "--against", str(before)]) == 1
