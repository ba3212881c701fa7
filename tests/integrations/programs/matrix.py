"""One step in the loops of other libraries, against the gradients of the whole batch in one process.

    torchrun --nproc-per-node 2 tests/integrations/programs/matrix.py torch [LIBRARY...]

It prints the largest error of the gradient of a parameter, relative to its norm, for each library and way to train. The
gradients are the changes of the parameters by a step of SGD, in float32 or under autocast to bfloat16. The gradients of
the whole batch are those of the library's own loss in float64. Two ranks have 9 and 14 of 23 pairs.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import json
import logging
import os
import string
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / folder)
    for folder in (".", "integrations", "training/programs", "comm/programs", "../benchmarks")
)

import accelerate
import lightning
import retrievers
import tiny_models
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from engines import say
from lightning.pytorch.strategies import ModelParallelStrategy
from peers import stubs
from recipes import recipe
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_cached import calls, count_reductions
from training_steps import Batches, epoch
from transformers import TrainingArguments

import contrastile
from contrastile import training
from contrastile.integrations.open_clip import ChunkedModel
from contrastile.integrations.transformers import ImageTextFeatures

PAIRS, CHUNK = 23, 4
WAYS = ("plain", "cached", "compile", "checkpointing", "LoRA", "bf16", "accumulation")
SHARDED = ("FSDP2", "ZeRO 1", "ZeRO 2")
LOSS = functools.partial(contrastile.clip_loss, group="world")
Model, Given, Batch = nn.Module, list[Any], Any
compiled_calls: list[None] = []
COUNTED = "ofi"
"""The name of a compiler that accelerate accepts and torch does not register."""


@functools.partial(torch._dynamo.register_backend, name=COUNTED)
def counting_compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Count the calls of compiled graphs, which aot_eager runs without generated code."""
    run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
    return lambda *arguments: [compiled_calls.append(None), run(*arguments)][-1]


class Pairs(nn.Module):
    """A CLIP model of transformers with positional arguments, as most loops call models."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.features = ImageTextFeatures(model)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.features(**dict(zip(tiny_models.inputs(0), inputs, strict=True)))


def rate(name: str) -> float:
    """A learning rate so large that rounding does not hide a step; smaller for a scale, which open_clip clamps."""
    return 0.25 if "logit" in name else 1024.0


def sgd(model: Model) -> torch.optim.Optimizer:
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return torch.optim.SGD([{"params": [parameter], "lr": rate(name)} for name, parameter in parameters])


def is_distributed() -> bool:
    return dist.get_world_size() > 1


def sharded(model: Model) -> Model:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def zero(way: str, steps: int, **options: Any) -> dict[str, Any]:
    """The configuration of DeepSpeed, which would clip gradients without gradient_clipping = 0."""
    stage = {"stage": int(way.removeprefix("ZeRO ")) if way.startswith("ZeRO") else 0}
    autocast = {"enabled": way == "bf16", "dtype": "bfloat16"}
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": steps} | options
    required = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**batch, **required, "gradient_clipping": 0.0, "zero_optimization": stage, "torch_autocast": autocast}


def by_pytorch(model: Model, batches: Given, way: str) -> None:
    wrapped: Any = sharded(model) if way == "FSDP2" else DistributedDataParallel(model) if is_distributed() else model
    optimizer = sgd(model)
    for i, batch in enumerate(batches):
        accumulates = is_distributed() and i + 1 < len(batches)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"),
            wrapped.no_sync() if accumulates else nullcontext(),
        ):
            if way == "plain":
                LOSS(*wrapped(*batch)).backward()
            else:
                (training.Cached(LOSS, wrapped, CHUNK)(*batch) / len(batches)).backward()
    optimizer.step()


def by_trainer(kind: Any, arguments: Any, model: Model, batches: Given, way: str, **options: Any) -> None:
    """A step of transformers' Trainer, or of a subclass."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": len(batches), "max_grad_norm": 0.0, "max_steps": 1}
    settings |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "bf16": way == "bf16"}
    settings |= {"remove_unused_columns": False, "lr_scheduler_type": "constant"}
    if way == "compile":
        settings |= {"torch_compile": True, "torch_compile_backend": COUNTED}
    if way == "FSDP2":
        fsdp_config = {"version": 2, "auto_wrap_policy": "NO_WRAP", "cpu_ram_efficient_loading": False}
        settings |= {"fsdp": True, "fsdp_config": fsdp_config}
    if way.startswith("ZeRO"):
        settings["deepspeed"] = zero(way, len(batches), train_micro_batch_size_per_gpu="auto")
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(model, arguments(folder, **settings), **options)

        def create_optimizer(*_: Any) -> torch.optim.Optimizer:
            # under DeepSpeed the trainer has an optimizer already
            trainer.optimizer = trainer.optimizer or sgd(model)
            return trainer.optimizer

        trainer.create_optimizer, trainer.get_train_dataloader = create_optimizer, lambda: Batches(batches)
        trainer.train()


def by_transformers(loss: Any, model: Model, batches: Given, way: str) -> None:
    kind = recipe("transformers")["Trainer"]
    kind.loss, kind.chunk = staticmethod(loss), PAIRS if way == "plain" else CHUNK
    by_trainer(kind, TrainingArguments, model, batches, way, train_dataset=[0])


def by_sentence_transformers(model: Model, batches: Given, way: str) -> None:
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    from contrastile.integrations import sentence_transformers as ours

    kind, loss_options = ours.MultipleNegativesRankingLoss, dict[str, Any](gather_across_devices=is_distributed())
    if way != "plain":
        kind, loss_options["mini_batch_size"] = ours.CachedMultipleNegativesRankingLoss, CHUNK
    options: Any = {"loss": kind(model, **loss_options), "train_dataset": datasets.Dataset.from_dict({"anchor": ["a"]})}
    by_trainer(SentenceTransformerTrainer, SentenceTransformerTrainingArguments, model, batches, way, **options)


def by_open_clip(model: Model, batches: Given, way: str) -> None:
    wrapped: Any = DistributedDataParallel(model) if is_distributed() else model
    wrapped = wrapped if way == "plain" else ChunkedModel(wrapped, CHUNK)
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    loss = contrastile.nn.ClipLoss(local_loss=True, gather_with_grad=True, cache_labels=True, **place)
    precision = "amp_bf16" if way == "bf16" else "fp32"
    epoch(wrapped, batches, PAIRS, loss, sgd(model), rank=1, device="cpu", precision=precision)


def by_lightning(model: Model, batches: Given, way: str) -> None:
    kind = recipe("Lightning")["CachedOnSeveral" if is_distributed() else "Cached"]
    module = kind(model, PAIRS if way == "plain" else CHUNK)
    module.configure_optimizers = lambda: sgd(model)
    if way == "FSDP2":
        module.configure_model = lambda: sharded(model)
    strategy = {"FSDP2": ModelParallelStrategy(), "ZeRO 1": "deepspeed_stage_1", "ZeRO 2": "deepspeed_stage_2"}
    disabled = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = {"accelerator": "cpu", "devices": dist.get_world_size(), **dict.fromkeys(disabled, False)}
    options |= {"max_epochs": 1, "accumulate_grad_batches": len(batches)}
    options |= {"strategy": strategy.get(way, "ddp" if is_distributed() else "auto")}
    options |= {"precision": "bf16-mixed" if way == "bf16" else "32-true"}
    lightning.Trainer(**options).fit(module, Batches(batches))


def by_accelerate(model: Model, batches: Given, way: str) -> None:
    options: dict[str, Any] = {"cpu": not way.startswith("ZeRO"), "gradient_accumulation_steps": len(batches)}
    if way == "bf16":
        options["mixed_precision"] = "bf16"
    if way == "compile":
        options["dynamo_backend"] = COUNTED
    if way == "FSDP2":
        options["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    if way.startswith("ZeRO"):
        options["deepspeed_plugin"] = accelerate.DeepSpeedPlugin(hf_ds_config=zero(way, len(batches)))
    chunk = PAIRS if way == "plain" else CHUNK
    recipe("accelerate")["train"](accelerate.Accelerator(**options), model, sgd(model), batches, chunk)


def by_deepspeed(model: Model, batches: Given, way: str) -> None:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=zero(way, len(batches)))
    for batch in batches:
        if way == "plain":
            engine.backward(LOSS(*engine(*batch)))
        else:
            training.cached_step(engine, batch, LOSS, chunk=CHUNK)
        engine.step()


def by_retriever(model: Model, batches: Given, way: str) -> None:
    """A step of packages whose models return the loss, or of GradCache."""
    inner: Any = model.encoder if way == "cached" else model
    # no loss here uses the pooler of BERT
    wrapped = DistributedDataParallel(inner, find_unused_parameters=True) if is_distributed() else inner
    optimizer = sgd(model)
    if way == "cached":
        retrievers.gradcache(wrapped, batches[0], ours=True)
    else:
        wrapped(batches[0], ours=True).backward()
    optimizer.step()


def of_transformers(model: Any, batch: Batch) -> Tensor:
    inputs = batch if isinstance(batch, dict) else dict(zip(tiny_models.inputs(0), batch, strict=True))
    return getattr(model, "features", model).model(**inputs, return_loss=True).loss


def of_open_clip(model: Model, batch: Batch) -> Tensor:
    import open_clip

    return open_clip.ClipLoss()(**model(*batch))


def of_sentence_transformers(model: Any, batch: Batch) -> Tensor:
    from sentence_transformers.sentence_transformer import losses

    columns = [
        {n.removeprefix(f"{c}_"): x for n, x in batch.items() if n.startswith(c)} for c in ("anchor", "positive")
    ]
    return losses.MultipleNegativesRankingLoss(model)(columns, None)


def clip_model_and_batch() -> tuple[Model, Batch]:
    return Pairs(tiny_models.clip()), tuple(tiny_models.inputs(PAIRS).values())


def open_clip_model_and_batch() -> tuple[Model, Batch]:
    stubs.install()
    import open_clip

    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(layers=1, width=16, head_width=8, patch_size=4, image_size=8)
    text = open_clip.CLIPTextCfg(layers=1, width=16, heads=2, context_length=6, vocab_size=20)
    return open_clip.CLIP(8, vision, text, output_dict=True), tuple(tiny_models.inputs(PAIRS).values())[:2]


def sentence_model_and_batch() -> tuple[Model, Batch]:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.sentences(Path(folder))
    batch = {}
    for column, start in (("anchor", 0), ("positive", 5)):
        texts = [" ".join((2 * string.ascii_lowercase)[start + i : start + i + 1 + i % 3]) for i in range(PAIRS)]
        batch |= {f"{column}_{name}": x for name, x in model.preprocess(texts).items() if isinstance(x, Tensor)}
    return model, batch


class Library(NamedTuple):
    """A model and a batch, the library's own loss, a step of its loop, and its ways to train."""

    make: Callable[[], tuple[Model, Batch]]
    own: Callable[[Any, Batch], Tensor]
    step: Callable[[Model, Given, str], None]
    ways: tuple[str, ...] = (*WAYS, *SHARDED)


def transformers_library(make: Callable[[], Any], loss: Any) -> Library:
    make_features = lambda: (ImageTextFeatures(make()), tiny_models.inputs(PAIRS))  # noqa: E731
    return Library(make_features, of_transformers, functools.partial(by_transformers, loss))


def retriever(loss: Any, way: str = "plain") -> Library:
    make = lambda: (retrievers.Whole(loss), retrievers.batch(PAIRS))  # noqa: E731
    return Library(make, lambda model, batch: model(batch, ours=False), by_retriever, (way,))


LIBRARIES = {
    "PyTorch": Library(clip_model_and_batch, of_transformers, by_pytorch, (*WAYS, "FSDP2")),
    "transformers, CLIP": transformers_library(tiny_models.clip, contrastile.clip_loss),
    "transformers, SigLIP": transformers_library(tiny_models.siglip, contrastile.sigmoid_loss),
    "sentence-transformers": Library(sentence_model_and_batch, of_sentence_transformers, by_sentence_transformers),
    "open_clip": Library(open_clip_model_and_batch, of_open_clip, by_open_clip, WAYS[:-1]),
    "Lightning": Library(clip_model_and_batch, of_transformers, by_lightning),
    "accelerate": Library(clip_model_and_batch, of_transformers, by_accelerate),
    "DeepSpeed": Library(clip_model_and_batch, of_transformers, by_deepspeed, (*WAYS, "ZeRO 1", "ZeRO 2")),
    "Tevatron": retriever(retrievers.tevatron),
    "FlagEmbedding": retriever(retrievers.flag_embedding),
    "NeMo Automodel": retriever(retrievers.nemo_automodel),
    "GradCache": retriever(retrievers.gradcache, "cached"),
}


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Apply a function to every tensor of a batch."""
    return {n: function(x) for n, x in batch.items()} if isinstance(batch, dict) else tuple(map(function, batch))


def prepare(model: Any, way: str, by: Any) -> None:
    """Prepare a model for its trainer as a user does, except for adapters."""
    if way == "compile" and by in (by_pytorch, by_open_clip, by_lightning, by_deepspeed):
        model.compile(backend=COUNTED)
    if way == "checkpointing":
        inner = getattr(model, "features", model)
        inner = inner[0].auto_model if hasattr(inner, "encode") else inner
        getattr(inner, "gradient_checkpointing_enable", getattr(inner, "set_grad_checkpointing", None))()
    if way in SHARDED or by is by_deepspeed:
        # these trainers take no scalar parameters
        for parameter in model.parameters():
            parameter.data = parameter.data.view(parameter.shape or 1)


def mean_gradients(model: Model, own_loss: Callable[[Any, Batch], Tensor], batches: Given) -> dict[str, Tensor]:
    """The gradients of the mean of the library's own losses over the batches."""
    for batch in batches:
        (own_loss(model, batch) / len(batches)).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


def largest_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    largest = max(x.norm() for x in expected.values())
    # the bias of the keys in a softmax has no gradient but roundings
    names = [name for name, x in expected.items() if x.norm() > 1e-12 * largest]
    return max(((actual[name] - expected[name]).norm() / expected[name].norm()).item() for name in names)


def errors(model: Any, batch: Batch, library: Library, way: str) -> tuple[float, float]:
    """The errors of the step with our loss, and of the library's own loss of the whole batch in the same precision."""
    if way == "LoRA":
        torch.manual_seed(0)
        targets = ["q_proj", "v_proj", "query", "value", "c_fc"]
        config = importlib.import_module("peft").LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        importlib.import_module("peft").inject_adapter_in_model(config, model)
    model.float().train()
    batch = map_tensors(batch, lambda x: x.float() if x.is_floating_point() else x)
    cuts = [0, PAIRS // 2, PAIRS] if way == "accumulation" else [0, PAIRS]
    batches = [map_tensors(batch, lambda x, a=a, b=b: x[a:b]) for a, b in itertools.pairwise(cuts)]
    doubles = [map_tensors(part, lambda x: x.double() if x.is_floating_point() else x) for part in batches]
    expected = mean_gradients(copy.deepcopy(model).double(), library.own, doubles)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
        theirs = mean_gradients(copy.deepcopy(model), library.own, batches)
    before = {name: p.detach().double() for name, p in model.named_parameters()}

    def shard(x: Tensor) -> Tensor:
        cut = len(x) * 2 // 5
        return x if not is_distributed() else x[cut:] if dist.get_rank() else x[:cut]

    if (library.step, way) == (by_sentence_transformers, "ZeRO 2"):
        raise RuntimeError("aborts: ZeRO 2 reduces in each of its chunks, of which ranks have other numbers")
    prepare(model, way, library.step)
    compiled_calls.clear()
    library.step(model, [map_tensors(x, shard) for x in batches], way)
    if way == "compile" and not compiled_calls:
        raise RuntimeError("it compiled nothing")
    if way in SHARDED and calls:
        raise RuntimeError("not run: on a CPU it runs DDP instead")
    after: dict[str, Any] = dict(model.named_parameters())
    gathered = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in after.items() if n in expected}
    actual = {n: (before[n] - x.detach().double().view_as(before[n])) / rate(n) for n, x in gathered.items()}
    return largest_error(actual, expected), largest_error(theirs, expected)


def main() -> None:
    # libraries warn of other versions of torch, and log their start
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    # a model must be saved before there are ranks, because only rank 0 saves models
    models_and_batches = {name: LIBRARIES[name].make() for name in sys.argv[2:] or LIBRARIES}
    dist.init_process_group("gloo")
    variables = dict(os.environ)
    init = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = lambda self, *x, **y: [init(self, *x, **y), count_reductions(self), None][-1]
    for name, model_and_batch in models_and_batches.items():
        for way in LIBRARIES[name].ways:
            if way in SHARDED and not is_distributed():
                continue
            calls.clear()
            AcceleratorState._reset_state(True)
            row: dict[str, Any] = {"library": name, "way": way, "ranks": dist.get_world_size()}
            try:
                result = errors(*copy.deepcopy(model_and_batch), LIBRARIES[name], way)
                row |= {n: float(f"{x:.2g}") for n, x in zip(("error", "own"), result, strict=True)}
            except Exception as error:
                row["said"] = f"{type(error).__name__}: {error}"
            os.environ.clear()
            os.environ.update(variables)
            say(dist.get_rank(), json.dumps(row | {"reductions": len(calls)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
