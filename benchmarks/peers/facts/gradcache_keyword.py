"""A loss under `gather_input_tensor` or `cat_input_tensor` takes no keyword argument (it unpacks `kwargs.values()`).

package: GradCache
case: value
"""

import torch
from gradcache.functional import cat_input_tensor

rows = [torch.ones(2, 3), torch.ones(1, 3)]
try:
    raised = cat_input_tensor(lambda x, reduction: x.sum())(rows, reduction="mean") and "nothing"
except Exception as error:
    raised = type(error).__name__
print(f"a keyword argument raises = {raised}, right nothing")
