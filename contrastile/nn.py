"""torch modules with open_clip's constructors and calls, so that a training loop changes one import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar, SupportsIndex, Unpack

from contrastile import validation
from contrastile.backends.eager import outside_of_graphs
from contrastile.backends.registry import require
from contrastile.evaluation import computed, detached, evaluate, make, settings_checked
from contrastile.forms import form_of, threshold_of
from contrastile.losses import clip_loss, sigmoid_loss
from contrastile.plan import DEFAULTS, Settings, complete
from contrastile.problems import BUILDERS, LossProblem
from contrastile.schedules.handshake import Handshake

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError:
    require("contrastile.nn", "torch")
    raise


_PARAMETERS = signature(clip_loss).parameters | signature(sigmoid_loss).parameters
_USUAL = {name: each.default for name, each in _PARAMETERS.items()} | DEFAULTS


class _Loss(torch.nn.Module):
    """What every loss module holds: how to compute its loss, and with which ranks.

    Attributes:
        name: the loss's.
    """

    name: ClassVar[str] = "clip_loss"

    def __init__(self, rank: int, world_size: int, options: dict[str, Any], **settings: Unpack[Settings]) -> None:
        super().__init__()
        self.options = options
        for name, given in (("rank", rank), ("world_size", world_size)):
            if not isinstance(given, SupportsIndex):
                raise TypeError(
                    f"{name} must be an integer, got {given!r}; leave rank and world_size out and give group='world'"
                )
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must lie in 0..world_size-1, got {rank} of {world_size}; leave both out and give group='world'"
            )
        self.rank, self.world_size = rank, world_size
        self.settings = complete(settings)
        if self.group is None and world_size > 1:
            self.settings["group"] = "world"
        # in a group a call checks them, on every rank
        if self.group is None:
            settings_checked(self.settings)

    @property
    def group(self) -> Any:
        """The processes that share the batch, or None."""
        return self.settings["group"]

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        guide: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or ``{"contrastive_loss": loss}`` with ``output_dict``.

        Args:
            image_features: (b, d), normalised by the caller.
            text_features: (b, d).
            logit_scale: the factor itself, exp of the learned parameter, as open_clip passes it.
            logit_bias: added to every logit of ``SigLipLoss``, where it starts at -10. It has no effect on a softmax;
                its gradient is 0 there. None adds nothing.
            output_dict: whether to return a dict.
            ids: (b,) integers, or None: see ``contrastile.clip_loss``.
            weights: (b,) likewise.
            guide: two matrices, of ``ClipLoss`` alone, likewise.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        bias = 0.0 if logit_bias is None else logit_bias
        numbers = (logit_scale, bias) if self.name == "sigmoid_loss" else (logit_scale,)
        given = {"ids": ids, "weights": weights, **self.options}
        if guide is not None:
            if self.name != "clip_loss":
                raise ValueError("guide must be None with SigLipLoss, got one; it is of ClipLoss alone")
            given["guide"] = guide
        loss = self._evaluate(BUILDERS[self.name], image_features, text_features, *numbers, **given)
        if self.name == "clip_loss" and isinstance(logit_bias, Tensor):
            # zero, but a parameter that took part: DDP would otherwise wait for its gradient
            loss = loss + 0.0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss

    def _evaluate(self, build: Callable[..., LossProblem], *args: Any, **given: Any) -> Any:
        if self.group is None:
            return evaluate(build, self.settings, *args, **given)
        return evaluate(self._confirmed, self.settings, build, *args, **given)

    def _confirmed(self, build: Callable[..., LossProblem], *args: Any, world: Handshake, **given: Any) -> LossProblem:
        """The problem; raise, on every rank, if the rank and world size that were given are not the group's."""
        own = world.communicator
        # a rank of 0 is what open_clip has where none was given
        if own is None or self.world_size == 1 or (own.size == self.world_size and self.rank in (0, own.rank)):
            return build(*args, world=world, **given)
        raise ValueError(
            f"rank and world_size must be those of the group, where this is rank {own.rank} of {own.size}, got rank "
            f"{self.rank} of {self.world_size}; leave both out and give group='world'"
        )

    def extra_repr(self) -> str:
        """The settings that are not the usual ones, with backend and tile, for print(module)."""
        shown = {
            name: value
            for name, value in {**self.settings, **self.options}.items()
            if name in ("backend", "tile") or value != _USUAL.get(name)
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class ClipLoss(_Loss):
    """Symmetric CLIP loss, made and called as open_clip's ``ClipLoss``: see ``contrastile.clip_loss``.

    Every rank gets the loss of the global batch, where open_clip's ``local_loss`` gives the mean over a rank's own
    rows. With ``parameter_reduction="mean"`` the parameters' gradients after DDP's mean are those of the global loss,
    as open_clip's are with ``gather_with_grad=True``.

    Args:
        local_loss: changes nothing here: see above.
        gather_with_grad: changes nothing here: gradients always reach the features of all ranks.
        cache_labels: changes nothing here: there are no labels.
        rank: checked against the group, unless it is 0.
        world_size: more than 1 means the default group of torch.distributed, where ``group`` is None.
        use_horovod: must be False.
        ids_are, sum_positives, label_smoothing, margin, threshold, threshold_is: see ``contrastile.clip_loss``.
        **settings: see ``contrastile.plan.Settings``; ``parameter_reduction="mean"`` is right under DDP and FSDP.

    Raises:
        ValueError: ``use_horovod``, or a rank outside of the world.
        TypeError: the rank or the world size is no integer.
        ValueError, TypeError: a setting or an option is wrong; with a group, the first call raises.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        ids_are: str = "false_negatives",
        sum_positives: str = "outside",
        label_smoothing: float = 0.0,
        margin: float = 0.0,
        threshold: float | None = None,
        threshold_is: str = "absolute",
        **settings: Unpack[Settings],
    ) -> None:
        if use_horovod:
            raise ValueError(
                "use_horovod must be False, got True; give group= an mpi4py communicator, or a torch.distributed group"
            )
        options = {"ids_are": ids_are, "sum_positives": sum_positives, "label_smoothing": label_smoothing}
        more = {"margin": margin, "threshold": threshold, "threshold_is": threshold_is}
        super().__init__(rank, world_size, {**options, **more}, **settings)
        if self.group is None:
            # a call brings the ids
            ids, limit = None if ids_are == "false_negatives" else ids_are, threshold_of(threshold, threshold_is)
            form_of(ids, ids_are, sum_positives, label_smoothing, margin, limit, name="ids")

    def get_logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(b, b) logits of images by texts, and of texts by images, of this rank's own pairs: for code that logs them.

        This is the matrix that the loss itself never stores. open_clip's has the features of all ranks too.
        """
        of_images = logit_scale * image_features @ text_features.T + (0.0 if logit_bias is None else logit_bias)
        return of_images, of_images.T


class CoCaLoss(ClipLoss):
    """CLIP's loss and that of the captions, made and called as open_clip's ``CoCaLoss``.

    The caption loss is the mean over this rank's own tokens, as open_clip's is; the contrastive one is ``ClipLoss``.

    Args:
        caption_loss_weight: what the caption loss is multiplied by.
        clip_loss_weight: what the contrastive loss is multiplied by; 0 leaves it out.
        pad_id: the label of tokens that do not count.
        local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod: see ``ClipLoss``.
        **options: keywords of ``ClipLoss``.

    Raises:
        ValueError, TypeError: see ``ClipLoss``.
    """

    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod, **options)
        self.caption_loss_weight, self.clip_loss_weight, self.pad_id = caption_loss_weight, clip_loss_weight, pad_id

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor | float,
        output_dict: bool = False,
        **given: Any,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Both losses, or ``{"contrastive_loss": ..., "caption_loss": ...}`` with ``output_dict``.

        Args:
            image_features: see ``ClipLoss``.
            text_features: see ``ClipLoss``.
            logits: (b, length, vocabulary), of the next token.
            labels: (b, length) integers.
            logit_scale: see ``ClipLoss``.
            output_dict: see ``ClipLoss``.
            **given: ids, weights and guide, as ``ClipLoss`` takes them.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        contrastive: Any = logits.new_zeros(())
        if self.clip_loss_weight:
            found: Any = super().forward(image_features, text_features, logit_scale, **given)
            contrastive = self.clip_loss_weight * found
        of_tokens = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.pad_id)
        caption = self.caption_loss_weight * of_tokens
        return {"contrastive_loss": contrastive, "caption_loss": caption} if output_dict else (contrastive, caption)


class DistillClipLoss(ClipLoss):
    """CLIP's loss and the distillation from a teacher's features, made and called as open_clip's ``DistillClipLoss``.

    The distillation is the mean of both directions' cross-entropies with the teacher's softmax over the pairs of all
    ranks. Values and gradients are of the global batch, as those of ``ClipLoss``. Let G_t be the gradient of the
    *teacher's* CLIP loss by its logits. Then the distillation is ``clip - sum_ij G_t,ij x_ij``, x being the student's
    logits; ``G_t K`` and ``G_t^T Q`` are its gradients. A call takes about twice the time of ``ClipLoss``.

    The arguments are those of ``ClipLoss`` without options. For 16-bit features ``G_t K`` is rounded as gradients are.

    Raises:
        ValueError, TypeError: see ``ClipLoss``; or there are options.
    """

    def __init__(self, *place: Any, **named: Any) -> None:
        super().__init__(*place, **named)
        given = [name for name, x in self.options.items() if x != _USUAL[name]]
        if given:
            raise ValueError(f"DistillClipLoss must have no {given[0]}, got one; use a ClipLoss beside it")

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Both losses, or ``{"contrastive_loss": ..., "distill_loss": ...}`` with ``output_dict``.

        Args:
            image_features: see ``ClipLoss``.
            text_features: see ``ClipLoss``.
            logit_scale: see ``ClipLoss``.
            dist_image_features: (b, e) of the teacher, normalised by the caller; no gradient reaches them.
            dist_text_features: (b, e) likewise.
            dist_logit_scale: the teacher's factor, not 0, likewise.
            output_dict: see ``ClipLoss``.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        teacher = map(detached, (dist_image_features, dist_text_features, dist_logit_scale))
        args: Any = (image_features, text_features, logit_scale, *teacher)
        both = None
        if self.group is None:
            from contrastile.autograd.prepared import replayed

            def make_clip(args: Any, _: Any) -> Any:
                return make(BUILDERS["clip_loss"], self.settings, args[:3], {})

            both = replayed(
                "DistillClipLoss", self.settings, args, make_clip, lambda args, _: torch.stack(self._both(*args))
            )
        contrastive, distill = self._both(*args) if both is None else both
        return {"contrastive_loss": contrastive, "distill_loss": distill} if output_dict else (contrastive, distill)

    def _both(self, q: Tensor, k: Tensor, logit_scale: Any, image: Tensor, text: Tensor, dist_logit_scale: Any) -> Any:
        of_teacher = [x.to(q.dtype) for x in (image, text)]
        width = of_teacher[0].shape[-1]
        if [x.shape for x in of_teacher] != [(len(q), width), (len(k), width)]:
            raise ValueError(
                f"the teacher's features must be {len(q)} and {len(k)} rows, as the student's, of one width, got "
                f"shapes {tuple(of_teacher[0].shape)} and {tuple(of_teacher[1].shape)}; give those of the same samples"
            )
        with torch.autocast(q.device.type, enabled=False):  # which joins no features of another 16-bit dtype
            both = torch.cat([of_teacher[0], q], 1), torch.cat([of_teacher[1], k], 1)
        # the gradients of the global loss themselves, whatever a trainer makes of them
        settings: Any = {**self.settings, "parameter_reduction": "sum"}
        depth, state = of_teacher[0].shape[1], torch.promote_types(q.dtype, torch.float32)
        _, found = outside_of_graphs(computed)(_of_values, settings, (*both, dist_logit_scale), {"depth": depth})
        by_q, by_k = (x[:, depth:].to(state) / dist_logit_scale for x in found[:2])
        total, ranks = (q.detach() * by_q).sum(dtype=torch.float64), 1

        def with_total(*args: Any, world: Handshake, **given: Any) -> LossProblem:
            nonlocal total, ranks
            found = BUILDERS["clip_loss"](*args, world=world, **given)
            total = world.total(found.library, total)
            ranks = 1 if world.placement is None else world.placement.size
            return found

        contrastive = self._evaluate(BUILDERS["clip_loss"] if self.group is None else with_total, q, k, logit_scale)
        s = torch.as_tensor(logit_scale, dtype=contrastive.dtype, device=q.device).reshape(())
        factor = ranks if self.settings["parameter_reduction"] == "mean" else 1  # see Placement.factor
        learns = factor * (s.detach() * ((q * by_q).sum() + (k * by_k).sum()) + s * total / ranks)
        return contrastive, contrastive - (s.detach() * total + (learns - learns.detach())).to(contrastive.dtype)


def _of_values(*args: Any, depth: int, **given: Any) -> LossProblem:
    """CLIP's loss of features whose first ``depth`` columns form the logits: see ``schedules.values``."""
    found = BUILDERS["clip_loss"](*args, **given)
    return replace(found, problem=replace(found.problem, depth=depth, whole=None))


class SigLipLoss(_Loss):
    """Sigmoid loss, made and called as open_clip's ``SigLipLoss``: see ``contrastile.sigmoid_loss``.

    The value is the loss of the one global batch on every rank, where open_clip's is the mean over a rank's own images;
    with ``parameter_reduction="mean"`` the parameters' gradients after DDP's mean are the same.

    Args:
        cache_labels: changes nothing here, where there are none.
        rank: see ``ClipLoss``.
        world_size: see ``ClipLoss``.
        dist_impl: "bidir", "shift", "reduce", "gather" or None; changes nothing here: see ``exchange``.
        chunk_size: of open_clip 4; changes nothing here, where the matrix is never whole.
        ids_are, mean_positives: see ``contrastile.sigmoid_loss``.
        **settings: see ``contrastile.plan.Settings``; ``parameter_reduction="mean"`` is right under DDP and FSDP.

    Raises:
        ValueError: ``dist_impl`` is none of these, or a rank outside of the world.
        TypeError: the rank or the world size is no integer.
    """

    name = "sigmoid_loss"

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        *,
        chunk_size: int | None = None,
        ids_are: str = "false_negatives",
        mean_positives: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        if dist_impl not in (None, "bidir", "shift", "reduce", "gather"):
            raise ValueError(
                f"dist_impl must be one of bidir, shift, reduce, gather, got {dist_impl!r}; leave it out: exchange= "
                "chooses here"
            )
        super().__init__(rank, world_size, {"ids_are": ids_are, "mean_positives": mean_positives}, **settings)


class NTXentLoss(_Loss):
    """SimCLR's loss of two views, called as lightly's ``NTXentLoss`` without a memory bank.

    Args:
        temperature: what the cosines are divided by, positive.
        **settings: see ``ClipLoss``; lightly's ``gather_distributed`` is ``group="world"``.

    Raises:
        TypeError, ValueError: the temperature is no positive number.
    """

    name = "nt_xent"

    def __init__(self, temperature: float = 0.5, **settings: Unpack[Settings]) -> None:
        option = validation.option("temperature", temperature, sys.float_info.min, sys.float_info.max, "the default")
        super().__init__(0, 1, {"temperature": option}, **settings)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of both views' features, (b, d) each, which are normalised here.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        return self._of(_normalised("out0", out0), _normalised("out1", out1))

    def _of(self, *given: Tensor) -> Tensor:
        loss: Tensor = self._evaluate(BUILDERS[self.name], *given, 1 / self.options["temperature"])
        return loss


def _normalised(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; convert it")
    return torch.nn.functional.normalize(x, dim=-1) if x.is_floating_point() else x


class SupConLoss(NTXentLoss):
    """SupCon's L_out of features and labels, called as pytorch-metric-learning's ``SupConLoss``.

    The mean is over all samples that have a positive, also those whose loss is 0.

    Args:
        temperature: see ``NTXentLoss``; the loss is not multiplied by it.
        **settings: see ``ClipLoss``.
    """

    name = "sup_con"

    def __init__(self, temperature: float = 0.1, **settings: Unpack[Settings]) -> None:
        super().__init__(temperature, **settings)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of embeddings, (b, d), which are normalised here, and their labels, (b,) integers.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        return self._of(_normalised("embeddings", embeddings), labels)
