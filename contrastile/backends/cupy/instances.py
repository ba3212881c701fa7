"""Every kernel that the backend can launch, by its name in NVRTC; this module needs neither CuPy nor a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from contrastile.backends.cupy.build import Instance
from contrastile.backends.cupy.configs import Family, kernel_family
from contrastile.backends.passes import own_references

PLAIN, LIMITS, GUIDE, EXCLUSIONS, DROP, DROP_LIMITS, DROP_GUIDE, TARGET = MASKS = range(8)
"""Which pairs may not count: see ``pairs.cuh``."""

GUIDED = GUIDE, DROP_GUIDE
LIMITED = LIMITS, DROP_LIMITS, *GUIDED
"""The masks that only kernels of log-sum-exps and of their gradients have, and no kernels of narrow features. Only
Hopper's own kernels have the masks with a guide."""

ELEMENTS = {"float16": "contrastile::float16", "bfloat16": "contrastile::bfloat16", "float32": "float"}
"""The C++ name of a dtype."""

ARITHMETICS = {"ieee": "contrastile::Ieee", "tf32": "contrastile::Tf32"}
"""The C++ type of a precision of float32 products, in the sm_80 tile kernels."""

KEPT_DTYPE = "bfloat16"
"""The dtype of kept exponentials, and of the features of their logits."""

CAPABILITIES = (80, 90, 100)
"""The compute capabilities, times 10, for which kernels are compiled without a GPU of that kind."""


@cache
def instance(file: str, kernel: str, *arguments: str | int) -> Instance:
    """A kernel of ``file``.cu, with its template arguments."""
    template_arguments = ", ".join(map(str, arguments))
    return Instance(f"{file}.cu", f"{kernel}<{template_arguments}>" if template_arguments else kernel)


@cache
def tile_kernel(
    name: str, family: Family, dtype: str, mask: int, *, safe: bool | None = None, precision: str = "ieee"
) -> Instance:
    """A tile kernel.

    Args:
        name: "forward", "gradient" or "sigmoid".
        family: the kernel's family.
        dtype: name of the features' dtype.
        mask: which pairs may not count.
        safe: for "forward", whether each row and column has its own maximum.
        precision: the precision of float32 products.
    """
    full_name = f"{name}_{family.name}"
    flags = (mask,) if safe is None else (int(safe), mask)
    if family.stages is None:
        kernel = f"{name}_guided_{family.name}" if mask in GUIDED else full_name
        return instance(full_name, kernel, ELEMENTS[dtype], *flags)
    return instance(full_name, full_name, _arithmetic(dtype, precision), *flags, family.stages)


def _arithmetic(dtype: str, precision: str) -> str:
    return ARITHMETICS[precision] if dtype == "float32" else f"contrastile::Half<{ELEMENTS[dtype]}>"


def positives_kernel(dtype: str, precision: str) -> Instance:
    """The kernel of the positives' dots, which multiplies these features like the tile kernels."""
    return instance("positive_dots", "positive_dots", _arithmetic(dtype, precision))


def keeping_kernel(family: Family) -> Instance:
    """The fast form of "forward" for plain pairs that stores its exponentials."""
    return instance(f"forward_{family.name}", f"forward_keeping_{family.name}", ELEMENTS[KEPT_DTYPE])


def weighted_kernel(family: Family, *, across: bool) -> Instance:
    """The product of kept exponentials for the rows' sums, or with ``across`` for the columns' sums."""
    name = f"weighted_{family.name}"
    return instance(name, name, int(across))


def narrow_kernel(name: str, family: Family, dtype: str, mask: int) -> Instance:
    """A kernel for the rows of narrow features: "forward" or "gradient"."""
    full_name = f"narrow_{name}_{family.name}"
    return instance(full_name, full_name, ELEMENTS[dtype], mask)


def every(capability: int) -> list[Instance]:
    """All kernels for GPUs of a compute capability (times 10), each once."""
    return sorted(set(_every(capability)))


def _every(capability: int) -> Iterator[Instance]:
    for name in ("plan_forward", "plan_sigmoid"):
        yield instance("plan", name)
    for name in ("sum_positives", "weight_bounds", "epilogue_scales", "weighted_nll"):
        yield instance(name, name)
    yield instance("weighted_nll", "merge_lse")
    yield instance("fold", "fold_sigmoid")
    for name, path in product(("fold", "fold_positives"), ("false", "true")):
        yield instance("fold", name, path)
    yield instance("scale_cast", "add_doubles")
    for dtype, element in ELEMENTS.items():
        yield instance("measure", "measure", element)
        yield instance("finalize_rows", "finalize_rows", element)
        yield instance("scale_cast", "row_dots", element, "float")
        yield instance("scale_cast", "scale_cast", "float", element)
        precisions = tuple(ARITHMETICS) if dtype == "float32" else ("ieee",)
        yield from (positives_kernel(dtype, precision) for precision in precisions)
        # Hopper's own tile kernels, and the others
        for mask, hopper, precision in product(MASKS, (True, False), precisions):
            family = kernel_family(dtype, capability, hopper=hopper)
            if mask in GUIDED and not family.maps:
                continue
            for safe in (True,) if own_references(dtype) else (False, True):
                yield tile_kernel("forward", family, dtype, mask, safe=safe, precision=precision)
            for name in ("gradient",) if mask in LIMITED else ("gradient", "sigmoid"):
                yield tile_kernel(name, family, dtype, mask, precision=precision)
        family = kernel_family(dtype, capability)
        for name, mask in product(("forward", "gradient") if family.maps else (), set(MASKS) - set(LIMITED)):
            yield narrow_kernel(name, family, dtype, mask)
            yield instance(f"narrow_gradient_{family.name}", "narrow_join")
    if (family := kernel_family(KEPT_DTYPE, capability)).maps:
        yield keeping_kernel(family)
        yield from (weighted_kernel(family, across=across) for across in (False, True))
        yield instance("kept_positives", "kept_positives")
