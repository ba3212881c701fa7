"""Published losses as ``contrastile verify --loss`` takes them: functions of a rank that give a loss.

Each imports its package when it is called, so this module needs torch alone. The claims of a loss follow its arguments:
a temperature is a number, so there is no gradient of the scale; a loss of cosines normalises its features itself.
"""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from contrastile.bench import plain
from contrastile.verify.losses import Claims
from contrastile.verify.losses.cases import BATCHES, MEMORY
from contrastile.verify.losses.maxsim import MASKS
from peers import stubs

Loss = Callable[..., Any]
Factory = Callable[..., Loss]

KERNEL, INTERPRETED = "needs a GPU", "runs in Triton's interpreter"
TEMPERATURE = ("scale-0", "negative-scale")
"""Cases that no temperature can express."""
ALONE = (*BATCHES, MEMORY)
"""The cases of one process."""


PEERS: dict[str, Any] = {}
"""All published losses by name, in the order of the table."""


def peer(package: str, needs: str = "", without: tuple[str, ...] = (), **claims: Any) -> Callable[[Factory], Factory]:
    """Register a factory, ``(rank, world_size) -> loss``, whose docstring names the call.

    The arguments become attributes of the factory, and its docstring ``about``.

    Args:
        package: its name on PyPI.
        needs: "", ``INTERPRETED`` (a GPU, or Triton's interpreter) or ``KERNEL``.
        without: cases to leave out, because the loss's arguments cannot express them.
        **claims: the claims of ``verify``.
    """

    def register(factory: Factory) -> Factory:
        about = (factory.__doc__ or "").removesuffix(".")
        vars(factory).update(claims=Claims.of(claims), package=package, about=about, needs=needs, without=without)
        PEERS[factory.__name__] = factory
        return factory

    return register


def module(name: str) -> Any:
    """A published module, with stand-ins for imports that no loss uses."""
    stubs.install()
    return importlib.import_module(name)


def load_file(package: str, path: str) -> Any:
    """The names in a file of a published package, run without the imports of the package's ``__init__``."""
    (folder,) = importlib.util.find_spec(package).submodule_search_locations  # type: ignore[union-attr, misc]
    return SimpleNamespace(**runpy.run_path(f"{folder}/{path}"))


def two_sided(one_direction: Loss) -> Loss:
    """A symmetric loss from a linear cross entropy, ``(rows, weight, target) -> loss``, called for each direction."""

    def loss(image: Any, text: Any, scale: Any) -> Any:
        target = torch.arange(image.shape[0], device=image.device)
        return (one_direction(scale * image, text, target) + one_direction(scale * text, image, target)) / 2

    return loss


@peer("contrastile", ids=True, ranks=(2, 3))
def contrastile_torch(rank: int = 0, world_size: int = 1) -> Loss:
    """`clip_loss`, backend `torch`."""
    from contrastile import clip_loss

    group = "world" if world_size > 1 else None
    return lambda image, text, scale, ids=None: clip_loss(image, text, scale, ids=ids, backend="torch", group=group)


@peer("torch")
def torch_float32(rank: int = 0, world_size: int = 1) -> Loss:
    """`cross_entropy` of all logits, float32."""
    return plain.clip


@peer("torch", dtypes="bfloat16", state="bfloat16")
def torch_bfloat16(rank: int = 0, world_size: int = 1) -> Loss:
    """`cross_entropy` of all logits, bfloat16."""
    return plain.clip


@peer("torch", KERNEL, devices="cuda", precision="tf32")
def torch_tf32(rank: int = 0, world_size: int = 1) -> Loss:
    """`cross_entropy` of all logits, tf32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    return plain.clip


def _open_clip(rank: int, world_size: int, **options: bool) -> Loss:
    loss: Loss = module("open_clip").ClipLoss(rank=rank, world_size=world_size, **options)
    return loss


@peer("open_clip_torch", ranks=(2, 3), equal_shards=True)
def open_clip_default(rank: int = 0, world_size: int = 1) -> Loss:
    """`ClipLoss`, defaults."""
    return _open_clip(rank, world_size)


@peer("open_clip_torch", ranks=(2, 3), equal_shards=True)
def open_clip_local(rank: int = 0, world_size: int = 1) -> Loss:
    """`ClipLoss`, `local_loss`."""
    return _open_clip(rank, world_size, local_loss=True)


@peer("open_clip_torch", ranks=(2, 3), equal_shards=True)
def open_clip_gather_with_grad(rank: int = 0, world_size: int = 1) -> Loss:
    """`ClipLoss`, `local_loss`, `gather_with_grad`."""
    return _open_clip(rank, world_size, local_loss=True, gather_with_grad=True)


@peer("open_clip_torch", objective="sigmoid_loss", ranks=(2, 3), equal_shards=True)
def open_clip_siglip(rank: int = 0, world_size: int = 1) -> Loss:
    """`SigLipLoss`."""
    loss: Loss = module("open_clip.loss").SigLipLoss(rank=rank, world_size=world_size)
    return loss


_COSINES: dict[str, Any] = {"normalises": True, "scale_gradient": False, "ranks": (2, 3), "equal_shards": True}


def _sentence_losses() -> Any:
    return module("sentence_transformers.sentence_transformer.losses")


def _ranking(name: str, gather: bool) -> Loss:
    loss_class = getattr(_sentence_losses(), name)
    return lambda query, key, scale: loss_class(
        torch.nn.Identity(), scale=scale, gather_across_devices=gather
    ).compute_loss_from_embeddings([query, key], None)


@peer("sentence-transformers", "", TEMPERATURE, objective="info_nce", **_COSINES)
def sentence_transformers_ranking(rank: int = 0, world_size: int = 1) -> Loss:
    """`MultipleNegativesRankingLoss`."""
    return _ranking("MultipleNegativesRankingLoss", world_size > 1)


@peer("sentence-transformers", "", TEMPERATURE, **_COSINES)
def sentence_transformers_symmetric(rank: int = 0, world_size: int = 1) -> Loss:
    """`MultipleNegativesSymmetricRankingLoss`."""
    return _ranking("MultipleNegativesSymmetricRankingLoss", world_size > 1)


@peer("sentence-transformers", "", TEMPERATURE, objective="info_nce", **_COSINES)
def sentence_transformers_cached(rank: int = 0, world_size: int = 1) -> Loss:
    """`CachedMultipleNegativesRankingLoss`."""
    # its loss alone, because there is no encoder to split into chunks
    loss_class, gather = _sentence_losses().CachedMultipleNegativesRankingLoss, world_size > 1
    model = torch.nn.Sequential(torch.nn.Identity())
    return lambda query, key, scale: loss_class(
        model, scale=scale, mini_batch_size=16, gather_across_devices=gather
    ).calculate_loss([[query], [key]])


@peer("GradCache", objective="info_nce", ranks=(2, 3), equal_shards=True)
def gradcache(rank: int = 0, world_size: int = 1) -> Loss:
    """`gradcache.loss`."""
    losses = module("gradcache.loss")
    loss = losses.DistributedContrastiveLoss() if world_size > 1 else losses.SimpleContrastiveLoss()
    return lambda query, key, scale: loss(scale * query, key)


def _metric_learning(name: str, scale: float, world_size: int) -> Loss:
    loss = getattr(module("pytorch_metric_learning.losses"), name)(temperature=1 / scale)
    wrapper = module("pytorch_metric_learning.utils.distributed").DistributedLossWrapper
    wrapped: Loss = wrapper(loss) if world_size > 1 else loss
    return wrapped


# memory grows with the cube of the batch
@peer("pytorch-metric-learning", "", TEMPERATURE, objective="info_nce", largest_batch=256, **_COSINES)
def pytorch_metric_learning_towers(rank: int = 0, world_size: int = 1) -> Loss:
    """`NTXentLoss` of two towers."""

    def loss(query: Any, key: Any, scale: float) -> Any:
        # labels differ between ranks; they are two tensors, because one tensor as both drops every positive
        label = torch.arange(len(query), device=query.device) + rank * 2**20
        return _metric_learning("NTXentLoss", scale, world_size)(query, label, ref_emb=key, ref_labels=label.clone())

    return loss


@peer("pytorch-metric-learning", "", TEMPERATURE, objective="sup_con", **_COSINES)
def pytorch_metric_learning_supcon(rank: int = 0, world_size: int = 1) -> Loss:
    """`SupConLoss`."""
    return lambda features, labels, scale: _metric_learning("SupConLoss", scale, world_size)(features, labels)


@peer("lightly", "", TEMPERATURE, objective="nt_xent", **_COSINES)
def lightly(rank: int = 0, world_size: int = 1) -> Loss:
    """`NTXentLoss`."""
    loss_class, gather = module("lightly.loss").NTXentLoss, world_size > 1
    return lambda view_a, view_b, scale: loss_class(temperature=1 / scale, gather_distributed=gather)(view_a, view_b)


@peer("info-nce-pytorch", "", TEMPERATURE, objective="info_nce", normalises=True, scale_gradient=False)
def info_nce_pytorch(rank: int = 0, world_size: int = 1) -> Loss:
    """`InfoNCE`."""
    loss_class = module("info_nce").InfoNCE
    return lambda query, key, scale: loss_class(temperature=1 / scale)(query, key)


@peer("nemo-automodel", "", TEMPERATURE)
def nemo_automodel(rank: int = 0, world_size: int = 1) -> Loss:
    """`infonce_loss`, symmetric."""
    infonce_loss, options = module("nemo_automodel.components.loss.infonce").infonce_loss, {"normalize": False}
    return lambda image, text, scale: infonce_loss(image, text, temperature=1 / scale, direction="symmetric", **options)


@peer("tevatron", objective="info_nce", ranks=(2, 3), equal_shards=True)
def tevatron(rank: int = 0, world_size: int = 1) -> Loss:
    """`tevatron.loss`, one target per query."""
    losses = module("tevatron.loss")
    loss = losses.DistributedContrastiveLoss(n_target=1) if world_size > 1 else losses.SimpleContrastiveLoss()
    return lambda query, key, scale: loss(scale * query, key)


# the largest batch is the size of its default buffer of indices
@peer("colpali-engine", "", TEMPERATURE, objective="info_nce", scale_gradient=False, largest_batch=1024)
def colpali_engine(rank: int = 0, world_size: int = 1) -> Loss:
    """`BiEncoderLoss`."""
    loss_class = module("colpali_engine.loss.bi_encoder_losses").BiEncoderLoss
    return lambda query, key, scale: loss_class(temperature=1 / scale)(query, key)


@peer("pylate", "", TEMPERATURE, objective="maxsim", masks=True, normalises=True, scale_gradient=False)
def pylate(rank: int = 0, world_size: int = 1) -> Loss:
    """`Contrastive` of texts of several tokens."""
    loss_class = module("pylate.losses").Contrastive

    def loss(query: Any, document: Any, scale: float, **masks: Any) -> Any:
        model: Any = torch.nn.Identity()
        model.skiplist, model.do_query_expansion = [], False
        ones = [torch.ones(x.shape[:2], dtype=torch.long, device=x.device) for x in (query, document)]
        features = zip((query, document), ones, masks.values() or ones, strict=True)
        texts = [{"token_embeddings": x, "input_ids": ids, "attention_mask": mask} for x, ids, mask in features]
        return loss_class(model, temperature=1 / scale)(texts)

    return loss


@peer("colpali-engine", "", TEMPERATURE, objective="maxsim", masks=True, scale_gradient=False, largest_batch=1024)
def colpali_engine_tokens(rank: int = 0, world_size: int = 1) -> Loss:
    """`ColbertLoss`, `normalize_scores=False`."""
    loss_class = module("colpali_engine.loss.late_interaction_losses").ColbertLoss

    def loss(query: Any, document: Any, scale: float, **masks: Any) -> Any:
        # the loss has no argument for a mask: "pad tokens must be exactly zero"
        texts = [x * masks[name][:, :, None] if masks else x for x, name in zip((query, document), MASKS, strict=True)]
        return loss_class(temperature=1 / scale, normalize_scores=False)(*texts)

    return loss


# the interpreter runs a program for every pair
@peer("flash-maxsim", INTERPRETED, (MEMORY,), objective="maxsim", largest_batch=6)
def flash_maxsim(rank: int = 0, world_size: int = 1) -> Loss:
    """`flash_maxsim_batched_train`, with torch's `cross_entropy`."""
    maxsim = module("flash_maxsim").flash_maxsim_batched_train
    return lambda query, document, scale: torch.nn.functional.cross_entropy(
        maxsim(query, document) * scale, torch.arange(len(query), device=query.device)
    )


@peer("FlagEmbedding", "", TEMPERATURE, objective="info_nce", scale_gradient=False)
def flag_embedding(rank: int = 0, world_size: int = 1) -> Loss:
    """`BiEncoderOnlyEmbedderModel`, its loss alone."""
    model_class = module("FlagEmbedding.finetune.embedder.encoder_only.base.modeling").BiEncoderOnlyEmbedderModel
    return lambda query, key, scale: model_class(torch.nn.Identity(), temperature=1 / scale)._compute_in_batch_neg_loss(
        query, key
    )[1]


@peer("solo-learn", "", TEMPERATURE, objective="nt_xent", normalises=True, scale_gradient=False)
def solo_learn(rank: int = 0, world_size: int = 1) -> Loss:
    """`simclr_loss_func`."""
    simclr_loss = load_file("solo", "losses/simclr.py").simclr_loss_func
    return lambda view_a, view_b, scale: simclr_loss(view_a, view_b, temperature=1 / scale)


@peer("siglip-kernel", INTERPRETED, TEMPERATURE, objective="sigmoid_loss")
def siglip_kernel(rank: int = 0, world_size: int = 1) -> Loss:
    """`fused_siglip_loss`, `backend="chunked"`."""
    siglip_loss = module("siglip_kernel").fused_siglip_loss
    return lambda image, text, scale, bias: siglip_loss(image, text, scale.log(), bias, backend="chunked")


# in one process the function below is the same
@peer("inf-cl", "", ALONE, objective="info_nce", width_multiple=16, ranks=(2, 3), equal_shards=True)
def inf_cl_ring(rank: int = 0, world_size: int = 1) -> Loss:
    """`cal_ring_loss`, on ranks."""
    ring_loss = module("inf_cl").cal_ring_loss
    return lambda query, key, scale: ring_loss(query, key, scale=scale, head_dim=16)


@peer("inf-cl", INTERPRETED, objective="info_nce", width_multiple=16, feature_gradients=False, scale_gradient=False)
def inf_cl(rank: int = 0, world_size: int = 1) -> Loss:
    """`cal_inf_loss`, value only."""
    # do not use its ``scale``, whose backward needs a process group; its backward kernel has inline assembly, which the
    # interpreter cannot run
    inf_loss = module("inf_cl").cal_inf_loss
    return lambda query, key, scale: inf_loss(scale * query, key, head_dim=16)


@peer("memeff", INTERPRETED, TEMPERATURE, normalises=True, scale_gradient=False, smallest_width=64)
def memeff(rank: int = 0, world_size: int = 1) -> Loss:
    """`MemoryEfficientCLIPLoss`, `stable=False`."""
    loss_class = module("memeff").MemoryEfficientCLIPLoss
    return lambda image, text, scale: loss_class(temperature=1 / scale, stable=False)(image, text)


# the interpreter runs a program for every row
@peer("liger-kernel", INTERPRETED, largest_batch=128)
def liger(rank: int = 0, world_size: int = 1) -> Loss:
    """`LigerFusedLinearCrossEntropyLoss`, twice."""
    cross_entropy = module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return two_sided(lambda rows, weight, target: cross_entropy(weight, rows, target))


# its backward takes no float32
@peer("cut-cross-entropy", KERNEL, devices="cuda", dtypes="bfloat16")
def cut_cross_entropy(rank: int = 0, world_size: int = 1) -> Loss:
    """`linear_cross_entropy`, `filter_eps=None`, twice."""
    cross_entropy = module("cut_cross_entropy").linear_cross_entropy
    return two_sided(lambda rows, weight, target: cross_entropy(rows, weight, target, filter_eps=None))


@peer("quack-kernels", KERNEL, devices="cuda", dtypes="bfloat16", batch_multiple=8, width_multiple=8)
def quack(rank: int = 0, world_size: int = 1) -> Loss:
    """`chunked_linear_cross_entropy`, twice."""
    return two_sided(module("quack.linear_cross_entropy").chunked_linear_cross_entropy)
