"""torch modules with open_clip's constructors and calls, so that a training loop changes one import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any, ClassVar, SupportsIndex, Unpack

from contrastile import teachers, validation
from contrastile.backends.registry import require
from contrastile.evaluation import detached, evaluate, settings_checked
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
_DEFAULT_OPTIONS = {name: parameter.default for name, parameter in _PARAMETERS.items()} | DEFAULTS


class _Loss(torch.nn.Module):
    """The base of the loss modules: how to compute a loss, and with which ranks.

    Attributes:
        name: the name of the loss.
    """

    name: ClassVar[str] = "clip_loss"

    def __init__(self, rank: int, world_size: int, options: dict[str, Any], **settings: Unpack[Settings]) -> None:
        super().__init__()
        self.options = options
        for name, value in (("rank", rank), ("world_size", world_size)):
            if not isinstance(value, SupportsIndex):
                raise TypeError(
                    f"{name} must be an integer, got {value!r}; leave rank and world_size out and give group='world'"
                )
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must lie in 0..world_size-1, got {rank} of {world_size}; leave both out and give group='world'"
            )
        self.rank, self.world_size = rank, world_size
        self.settings = complete(settings)
        if self.group is None and world_size > 1:
            self.settings["group"] = "world"
        # with a group each call checks the settings, so that every rank raises
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
            image_features: (b, d), normalized by the caller.
            text_features: (b, d).
            logit_scale: the factor itself, exp of the learned parameter, as open_clip passes it.
            logit_bias: added to every logit of ``SigLipLoss``, where training starts at -10. It has no effect on a
                softmax, and its gradient is then 0. None adds nothing.
            output_dict: whether to return a dict.
            ids: (b,) integers, or None: see ``contrastile.clip_loss``.
            weights: (b,), or None: see ``contrastile.clip_loss``.
            guide: two matrices, for ``ClipLoss`` alone, or None: see ``contrastile.clip_loss``.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        bias = 0.0 if logit_bias is None else logit_bias
        numbers = (logit_scale, bias) if self.name == "sigmoid_loss" else (logit_scale,)
        kwargs = {"ids": ids, "weights": weights, **self.options}
        if guide is not None:
            if self.name != "clip_loss":
                raise ValueError("guide must be None with SigLipLoss, got one; it is of ClipLoss alone")
            kwargs["guide"] = guide
        loss = self._evaluate(BUILDERS[self.name], image_features, text_features, *numbers, **kwargs)
        if self.name == "clip_loss" and isinstance(logit_bias, Tensor):
            # adds 0, so that the bias gets a gradient: DDP would otherwise wait for one
            loss = loss + 0.0 * logit_bias.sum().clamp(-1, 1).to(loss.dtype)
        return {"contrastive_loss": loss} if output_dict else loss

    def _evaluate(self, build: Callable[..., LossProblem], *args: Any, **kwargs: Any) -> Any:
        if self.group is None:
            return evaluate(build, self.settings, *args, **kwargs)
        return evaluate(self._checked, self.settings, build, *args, **kwargs)

    def _checked(self, build: Callable[..., LossProblem], *args: Any, world: Handshake, **kwargs: Any) -> LossProblem:
        """Build the problem; raise, on every rank, if the module's rank and world size are not the group's."""
        comm = world.communicator
        # open_clip passes rank 0 by default
        if comm is None or self.world_size == 1 or (comm.size == self.world_size and self.rank in (0, comm.rank)):
            return build(*args, world=world, **kwargs)
        raise ValueError(
            f"rank and world_size must be those of the group, where this is rank {comm.rank} of {comm.size}, got rank "
            f"{self.rank} of {self.world_size}; leave both out and give group='world'"
        )

    def extra_repr(self) -> str:
        """The backend, the tile and all settings that differ from their defaults, for print(module)."""
        shown = {
            name: value
            for name, value in {**self.settings, **self.options}.items()
            if name in ("backend", "tile") or value != _DEFAULT_OPTIONS.get(name)
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class ClipLoss(_Loss):
    """Symmetric CLIP loss with the constructor and call of open_clip's ``ClipLoss``: see ``contrastile.clip_loss``.

    Every rank gets the loss of the global batch, whereas open_clip's ``local_loss`` gives the mean over a rank's own
    rows. With ``parameter_reduction="mean"`` the parameters' gradients after DDP's mean are those of the global loss,
    as in open_clip with ``gather_with_grad=True``.

    Args:
        local_loss: has no effect: every rank gets the global loss.
        gather_with_grad: has no effect: gradients always reach the features of all ranks.
        cache_labels: has no effect: there are no labels.
        rank: checked against the group, unless it is 0.
        world_size: more than 1 selects the default group of torch.distributed if ``group`` is None.
        use_horovod: must be False.
        ids_are, sum_positives, label_smoothing, margin, threshold, threshold_is: see ``contrastile.clip_loss``.
        **settings: see ``contrastile.plan.Settings``; ``parameter_reduction="mean"`` is right under DDP and FSDP.

    Raises:
        ValueError: ``use_horovod`` is True, or the rank is outside of the world.
        TypeError: the rank or the world size is no integer.
        ValueError, TypeError: a setting or an option is wrong; with a group the first call raises instead.
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
            # a call passes the ids: a placeholder stands for them here
            ids, rule = None if ids_are == "false_negatives" else ids_are, threshold_of(threshold, threshold_is)
            form_of(ids, ids_are, sum_positives, label_smoothing, margin, rule, name="ids")

    def get_logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(b, b) logits of this rank's pairs, images by texts and texts by images, for code that logs them.

        The loss itself never stores this matrix. open_clip's logits include the features of all ranks.
        """
        image_logits = logit_scale * image_features @ text_features.T + (0.0 if logit_bias is None else logit_bias)
        return image_logits, image_logits.T


class CoCaLoss(ClipLoss):
    """CLIP's loss and the caption loss, with the constructor and call of open_clip's ``CoCaLoss``.

    The caption loss is the mean over this rank's own tokens, as in open_clip; the contrastive loss is ``ClipLoss``.

    Args:
        caption_loss_weight: factor of the caption loss.
        clip_loss_weight: factor of the contrastive loss; 0 leaves it out.
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
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Both losses, or ``{"contrastive_loss": ..., "caption_loss": ...}`` with ``output_dict``.

        Args:
            image_features: see ``ClipLoss``.
            text_features: see ``ClipLoss``.
            logits: (b, length, vocabulary) logits of the next token.
            labels: (b, length) integers.
            logit_scale: see ``ClipLoss``.
            output_dict: see ``ClipLoss``.
            **kwargs: ids, weights and guide: see ``ClipLoss``.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        contrastive: Any = logits.new_zeros(())
        if self.clip_loss_weight:
            loss: Any = super().forward(image_features, text_features, logit_scale, **kwargs)
            contrastive = self.clip_loss_weight * loss
        token_loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=self.pad_id)
        caption = self.caption_loss_weight * token_loss
        return {"contrastive_loss": contrastive, "caption_loss": caption} if output_dict else (contrastive, caption)


class DistillClipLoss(ClipLoss):
    """CLIP's loss and the distillation from a teacher's features, called like open_clip's ``DistillClipLoss``.

    The distillation loss is the mean of both directions' cross-entropies with the teacher's softmax over the pairs of
    all ranks. Values and gradients are those of the global batch, as in ``ClipLoss``: see ``teacher`` of
    ``contrastile.clip_loss``. A call takes about twice the time of ``ClipLoss``.

    The arguments are those of ``ClipLoss`` without options.

    Raises:
        ValueError, TypeError: see ``ClipLoss``, or an option differs from its default.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        changed = [name for name, x in self.options.items() if x != _DEFAULT_OPTIONS[name]]
        if changed:
            raise ValueError(f"DistillClipLoss must have no {changed[0]}, got one; use a ClipLoss beside it")

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
            dist_image_features: (b, e) the teacher's features, normalized by the caller; they get no gradient.
            dist_text_features: (b, e), as ``dist_image_features``.
            dist_logit_scale: the teacher's factor, not 0; it gets no gradient.
            output_dict: see ``ClipLoss``.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        args = image_features, text_features, logit_scale
        teacher = [detached(x) for x in (dist_image_features, dist_text_features, dist_logit_scale)]
        contrastive = self._evaluate(BUILDERS["clip_loss"], *args)
        distill = contrastive + self._evaluate(teachers.BUILDERS["clip_loss"], *args, teacher=teacher)
        return {"contrastive_loss": contrastive, "distill_loss": distill} if output_dict else (contrastive, distill)


class SigLipLoss(_Loss):
    """Sigmoid loss with the constructor and call of open_clip's ``SigLipLoss``: see ``contrastile.sigmoid_loss``.

    Every rank gets the loss of the global batch, whereas open_clip gives the mean over a rank's own images. With
    ``parameter_reduction="mean"`` the parameters' gradients after DDP's mean equal open_clip's.

    Args:
        cache_labels: has no effect: there are no labels.
        rank: see ``ClipLoss``.
        world_size: see ``ClipLoss``.
        dist_impl: "bidir", "shift", "reduce", "gather" or None; has no effect: see ``exchange`` in ``Settings``.
        chunk_size: an option of open_clip 4; has no effect: the loss never stores the whole matrix.
        ids_are, mean_positives: see ``contrastile.sigmoid_loss``.
        **settings: see ``contrastile.plan.Settings``; ``parameter_reduction="mean"`` is right under DDP and FSDP.

    Raises:
        ValueError: ``dist_impl`` has another value, or the rank is outside of the world.
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
        temperature: the divisor of the cosines, positive.
        **settings: see ``ClipLoss``; lightly's ``gather_distributed`` is ``group="world"``.

    Raises:
        TypeError, ValueError: the temperature is no positive number.
    """

    name = "nt_xent"

    def __init__(self, temperature: float = 0.5, **settings: Unpack[Settings]) -> None:
        value = validation.option("temperature", temperature, sys.float_info.min, sys.float_info.max, "the default")
        super().__init__(0, 1, {"temperature": value}, **settings)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of both views' features, (b, d) each, which this module normalizes.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        return self._loss_of(_normalized("out0", out0), _normalized("out1", out1))

    def _loss_of(self, *args: Tensor) -> Tensor:
        loss: Tensor = self._evaluate(BUILDERS[self.name], *args, 1 / self.options["temperature"])
        return loss


def _normalized(name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; convert it")
    return torch.nn.functional.normalize(x, dim=-1) if x.is_floating_point() else x


class SupConLoss(NTXentLoss):
    """SupCon's L_out of features and labels, called as pytorch-metric-learning's ``SupConLoss``.

    The mean is over all samples that have a positive, including samples whose loss is 0.

    Args:
        temperature: see ``NTXentLoss``; the loss is not multiplied by it.
        **settings: see ``ClipLoss``.
    """

    name = "sup_con"

    def __init__(self, temperature: float = 0.1, **settings: Unpack[Settings]) -> None:
        super().__init__(temperature, **settings)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        """The loss of embeddings, (b, d), which this module normalizes, and their labels, (b,) integers.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        return self._loss_of(_normalized("embeddings", embeddings), labels)
