"""A model that two and four processes share, against the same model in one: losses, gradients, parameters, and what is sent.

Four processes on two cores take four minutes: those are left to ``make test-all``, and every run has four in ``test_train_ranks`` and
``test_layout_memory``.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import layout_jobs as jobs
import layout_models as models
import message_jobs as sending
import pytest
import torch
from process_group import Job, check, run_jobs_once

import fusible
from fusible.distributed import cost

Results = list[dict[str, Any]]

SIZES = (2, 4)
STEPS, FEW = 20, 6
KINDS = ("mha", "gqa", "mqa")
LOW = ("delayed", "current", "mxfp8")
MIXED = list(product(("fp32", *LOW), (False, True)))
"""A mixture of experts along ``tp`` alone: by what recipe, and whether rows are shared out."""
EACH = [
    *(jobs.scales_stay, jobs.refusals, jobs.too_few_rows, jobs.one_process_is_no_layout),
    *(jobs.a_copy_trains_as_its_model_does, jobs.a_compiler_calls_it_as_it_is, jobs.experts_without_tokens, jobs.begins_on_meta),
    jobs.embeddings,
    sending.sums,
    jobs.experts_chosen_by_sigmoids,
    *(jobs.stages_have_what_their_model_had, jobs.models_of_families),
]

JOBS: list[Job] = [
    *((f"{k} {s}", jobs.trained, (k, "fp32", s, STEPS)) for k, s in product(KINDS, (False, True))),
    *((f"{k} {r} {s}", jobs.trained, (k, r, s, FEW)) for k, r, s in product(("mha", "gqa"), LOW, (False, True))),
    *((f"logits {s}", jobs.trained_on_shared_logits, ("mha", s, FEW)) for s in (False, True)),
    *((f"sent {k} {r} {s}", sending.messages, (k, r, s, torch.float32)) for k, r, s in product(("mha", "mqa"), ("fp32", *LOW), (False, True))),
    *((f"sent {r}", sending.messages, ("mha", r, True, torch.bfloat16)) for r in ("fp32", *LOW)),
    *((f"generated {k}", jobs.generates, (k,)) for k in KINDS),
    *((job.__name__, job, ()) for job in EACH),
]
CONTEXT = list(product(("all_to_all", "ring"), (True, False)))
JOBS += [(f"sent {w} {c}", sending.messages_of_context, (w, c, torch.bfloat16)) for w, c in CONTEXT]

JOBS += [(f"moe {r} {s}", jobs.trained, ("moe", r, s, STEPS if r == "fp32" else FEW)) for r, s in MIXED]

MIXED_IN: dict[int, list[tuple[models.Dimensions, bool]]] = {
    2: [((("ep", 2),), False), ((("tp", 2),), False), ((("tp", 2),), True)],
    4: [((("ep", 4),), False), *(((("ep", 2), ("tp", 2)), s) for s in (False, True)), ((("cp", 2), ("ep", 2)), False)],
}
"""Meshes of a mixture of experts, and whether rows are shared out along ``tp``."""

Layout = tuple[models.Dimensions, bool, str, bool]
"""The mesh; whether rows are shared out along ``tp``, the way along ``cp``, and whether each block is fully sharded by itself."""
LAYOUTS: dict[int, list[Layout]] = {
    2: [*(((("cp", 2),), False, way, False) for way in ("all_to_all", "ring")), ((("ep", 2),), False, "all_to_all", False)],
    4: [
        *(((("dp_shard", 2), ("tp", 2)), s, "all_to_all", b) for s, b in product((False, True), (False, True))),
        *(((("cp", 2), ("tp", 2)), True, way, False) for way in ("all_to_all", "ring")),
        ((("dp_shard", 2), ("cp", 2)), False, "ring", False),
        ((("cp", 4),), False, "all_to_all", False),
        ((("cp", 4),), False, "ring", False),
        ((("ep", 4),), False, "all_to_all", False),
        *(((("dp_shard", 2), ("ep", 2)), False, "all_to_all", b) for b in (False, True)),
        *(((("ep", 2), ("tp", 2)), s, "all_to_all", False) for s in (False, True)),
        *(((("cp", 2), ("ep", 2)), False, way, False) for way in ("all_to_all", "ring")),
    ],
}
LAID_OUT = [(size, layout, recipe) for size, layouts in LAYOUTS.items() for layout in layouts for recipe in ("fp32", "mxfp8")]
LAID_OUT += [(size, ((("ep", size),), False, "all_to_all", False), recipe) for size in SIZES for recipe in ("delayed", "current")]


def steps_of(recipe: str) -> int:
    return STEPS if recipe == "fp32" else FEW


def kind_of(layout: Layout) -> str:
    """The model that is laid out so."""
    return "moe" if any(name == "ep" for name, _ in layout[0]) else "mha"


STAGED: dict[int, list[tuple[models.Dimensions, Any]]] = {
    2: [((("pp", 2),), 2), ((("pp", 2),), [1])],
    4: [((("pp", 4),), 4), ((("pp", 2), ("tp", 2)), 2)],
}
IN_STAGES = [(size, *layout, recipe) for size, layouts in STAGED.items() for layout in layouts for recipe in ("fp32", "mxfp8")]


def name_of(layout: Layout, recipe: str) -> str:
    dimensions, sequence, way, by_block = layout
    return " ".join([*(f"{name}{size}" for name, size in dimensions), way, *(["rows"] * sequence), *(["blocks"] * by_block), recipe])


@pytest.fixture(
    scope="module",
    params=[pytest.param(size, marks=pytest.mark.slow if size > 2 else (), id=f"{size} processes") for size in SIZES],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each process says of every job: one start of the processes for all tests."""
    size: int = request.param
    more = [
        (name_of(layout, r), jobs.trained_in_parts, (layout[0], kind_of(layout), r, *layout[1:], steps_of(r)))
        for of, layout, r in LAID_OUT
        if of == size
    ]
    more += [(f"{dimensions} {cuts} {r}", jobs.staged, (dimensions, cuts, r)) for of, dimensions, cuts, r in IN_STAGES if of == size]
    more += [(f"sent of experts {layout}", sending.messages_of_experts, layout) for layout in MIXED_IN[size]]
    more += [(f"scales of experts {layout}", jobs.experts_have_the_scales_of_one_process, layout) for layout in MIXED_IN[size]]
    saved = str(tmp_path_factory.mktemp("saved"))
    more += [("checkpoints", jobs.checkpoints_of_pytorch, (saved,)), ("shards", jobs.shards_of_every_layout, (saved,))]
    return run_jobs_once(tmp_path_factory, f"layouts{size}", [*JOBS, *more], size)


@cache
def alone(kind: str, recipe: str, steps: int, order: int = 1) -> models.Trained:
    torch.set_num_threads(1)
    return models.train(models.model(kind), models.RECIPES[recipe], steps, order=order)


def same(results: Results, name: str) -> dict[str, Any]:
    """What the processes say of a job, which must be the same in all to the bit."""
    first, *others = check(results, name)
    for other in others:
        assert torch.equal(first["losses"], other["losses"])
        for of in ("gradients", "parameters"):
            assert all(torch.equal(value, other[of][name]) for name, value in first[of].items()), of
    return first  # type: ignore[no-any-return]


def near(found: dict[str, Any], kind: str, steps: int, factor: float = 8.0) -> None:
    """Every tensor is as far from one process as one process is from itself when it adds up in another order, but for a factor; or within the
    rounding of a sum over the tokens."""
    one, other = alone(kind, "fp32", steps), alone(kind, "fp32", steps, order=-1)
    floor = 4 * torch.finfo(torch.float32).eps * (models.BATCH * models.TOKENS) ** 0.5
    for of in ("gradients", "parameters"):
        wanted, again = getattr(one, of), getattr(other, of)
        assert found[of].keys() == wanted.keys()
        for name, value in wanted.items():
            bound = factor * (again[name] - value).norm() + floor * value.norm()
            assert (found[of][name] - value).norm() <= bound, f"{of} {name}: {(found[of][name] - value).norm() / bound:.3g} times the bound"
    assert torch.allclose(found["losses"], torch.tensor(one.losses), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp and rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_it_is_one_process_but_for_rounding(results: Results, kind: str, sequence: bool) -> None:
    near(same(results, f"{kind} {sequence}"), kind, STEPS)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp and rows"])
@pytest.mark.parametrize("recipe", LOW)
@pytest.mark.parametrize("kind", ["mha", "gqa"])
def test_in_8_bits_its_losses_are_within_a_hundredth(results: Results, kind: str, recipe: str, sequence: bool) -> None:
    found = same(results, f"{kind} {recipe} {sequence}")
    assert torch.allclose(found["losses"], torch.tensor(alone(kind, recipe, FEW).losses), rtol=0.01, atol=0)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp and rows"])
def test_a_loss_of_logits_that_nobody_has_whole(results: Results, sequence: bool) -> None:
    loss = fusible.CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3)
    wanted, found = models.train(models.model("mha"), None, FEW, loss), same(results, f"logits {sequence}")
    assert torch.allclose(found["losses"], torch.tensor(wanted.losses), rtol=1e-5, atol=0)
    for name, value in wanted.gradients.items():
        assert (found["gradients"][name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_one_by_one_are_the_whole_sequence(results: Results, kind: str) -> None:
    for found in check(results, f"generated {kind}"):
        assert (found["one by one"] - found["whole"]).norm() <= 1e-5 * found["whole"].norm()
    with torch.no_grad():
        alone_ = models.model(kind)(next(models.batches(1))[0][:1, :6])[0]
    assert (found["whole"] - alone_).norm() <= 1e-5 * alone_.norm()


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp and rows"])
@pytest.mark.parametrize("recipe", ["fp32", *LOW])
@pytest.mark.parametrize("kind", ["mha", "mqa"])
def test_what_is_sent_is_what_is_derived(results: Results, kind: str, recipe: str, sequence: bool) -> None:
    check(results, f"sent {kind} {recipe} {sequence}")


@pytest.mark.parametrize(("recipe", "share"), [("delayed", 0.5), ("current", 0.5), ("mxfp8", 2 / 3 * (1 + 1 / 16))])
def test_what_is_gathered_in_8_bits_is_about_half_of_16(results: Results, recipe: str, share: float) -> None:
    """Of the blocks; the first and last of all, at which the model's own input and output are gathered, are in 16 bits in both. x is gathered in
    forward and again in backward, dy in backward. What is scaled by blocks has other values along rows than along columns, and of dy both are read;
    the scales of these 64 columns, padded as they are, take a sixteenth more."""
    ends = models.BATCH * models.TOKENS * (models.HIDDEN + models.VOCABULARY) * 2
    low, high = (check(results, f"sent {of}")[0]["all_gather"] - ends for of in (recipe, "fp32"))
    assert low == pytest.approx(share * high, rel=1e-3)


@pytest.mark.parametrize("job", EACH, ids=lambda job: job.__name__)
def test_in_every_process(results: Results, job: Any) -> None:
    check(results, job.__name__)


def test_checkpoints_of_pytorch_hold_the_shares(results: Results) -> None:
    check(results, "checkpoints")


def test_what_a_layout_has_saved_every_other_loads(results: Results) -> None:
    check(results, "shards")


@pytest.mark.parametrize(("way", "causal"), CONTEXT)
def test_what_attention_sends_is_what_is_derived(results: Results, way: str, causal: bool) -> None:
    check(results, f"sent {way} {causal}")


@pytest.mark.parametrize("layout", [layout for layouts in MIXED_IN.values() for layout in layouts], ids=str)
def test_what_experts_send_is_what_is_derived_and_their_scales_are_those_of_one_process(
    results: Results, layout: tuple[models.Dimensions, bool]
) -> None:
    if layout in MIXED_IN[len(results)]:
        check(results, f"sent of experts {layout}")
        check(results, f"scales of experts {layout}")


@pytest.mark.parametrize("rows", [False, True], ids=["columns", "columns and rows"])
@pytest.mark.parametrize("recipe", ["fp32", *LOW])
def test_a_mixture_along_tp_is_one_process(results: Results, recipe: str, rows: bool) -> None:
    found, steps = same(results, f"moe {recipe} {rows}"), steps_of(recipe)
    if recipe == "fp32":
        near(found, "moe", steps)
    assert torch.allclose(found["losses"], torch.tensor(alone("moe", recipe, steps).losses), rtol=0.01, atol=0)


@pytest.mark.parametrize(("size", "layout", "recipe"), [pytest.param(*each, id=f"{each[0]}: {name_of(*each[1:])}") for each in LAID_OUT])
def test_along_several_dimensions_it_is_one_process(results: Results, size: int, layout: Layout, recipe: str) -> None:
    name = name_of(layout, recipe)
    if name not in results[0]:
        return  # the mesh has another number of processes
    found, kind, steps = same(results, name), kind_of(layout), steps_of(recipe)
    if recipe == "fp32":
        near(found, kind, steps)
    assert torch.allclose(found["losses"], torch.tensor(alone(kind, recipe, steps).losses), rtol=0.01, atol=0)


@pytest.mark.parametrize(("size", "dimensions", "cuts", "recipe"), IN_STAGES)
def test_in_stages_it_is_one_process_that_adds_up_the_gradients_of_each_sequence(
    results: Results, size: int, dimensions: models.Dimensions, cuts: Any, recipe: str
) -> None:
    name = f"{dimensions} {cuts} {recipe}"
    if name not in results[0]:
        return  # the mesh has another number of processes
    found = check(results, name)
    gpt, (text, following) = models.model("mha"), next(models.batches(1))
    losses = []
    for one, target in zip(text, following, strict=True):
        with fusible.autocast(enabled=models.RECIPES[recipe] is not None, recipe=models.RECIPES[recipe]):
            loss = torch.nn.functional.cross_entropy(gpt(one[None])[0], target)
        (loss / models.BATCH).backward()
        losses.append(loss.detach())
    assert torch.allclose(found[-1]["losses"], torch.stack(losses), rtol=1e-5, atol=0)
    layout = cost.Layout(**dict(dimensions))
    shape = cost.Architecture(2 * models.LAYERS, models.HIDDEN, models.HEADS, models.HEADS, models.HIDDEN, models.VOCABULARY)
    passed = cost.traffic(shape, layout, None, models.TOKENS, torch.float32, models.BATCH).pp
    handed_on = sum(each["sent"] for each in found)
    assert handed_on == passed * layout.processes, (handed_on, passed * layout.processes)
    joined = {name: gradient for part in found for name, gradient in part["gradients"].items()}
    bound = 1e-5 if recipe == "fp32" else 1e-3
    assert joined.keys() == dict(gpt.named_parameters()).keys()
    for name, p in gpt.named_parameters():
        assert p.grad is not None and (joined[name] - p.grad).norm() <= bound * p.grad.norm(), name
