"""What ncu prints becomes one row for each kernel."""

from __future__ import annotations

import ncu

HEAD = '"ID","Kernel Name",' + ",".join(f'"{metric}"' for metric in ncu.METRICS.values())
TEXT = f"""==PROF== Connected to process 7
{HEAD}
"","","ns","%","byte","byte"
"0","void lse_tiles<float>(int)","1,000","50","10","2"
"1","gradient_tiles","8,000","40","1","1"
"2","void lse_tiles<float>(int)","3,000","90","20","4"
"""


def test_launches_of_a_kernel_are_added_and_its_share_is_averaged_over_time() -> None:
    longest, other = ncu.rows_of(TEXT)
    assert (longest["kernel"], longest["launches"], longest["us"]) == ("gradient_tiles", 1, 8.0)
    assert other == {"kernel": "lse_tiles", "launches": 2, "us": 4.0, "tensor": 80.0, "read": 30.0, "written": 6.0}


def test_without_figures_there_are_no_rows() -> None:
    assert ncu.rows_of("==ERROR== no permission\n") == []
