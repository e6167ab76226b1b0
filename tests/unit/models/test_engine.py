"""Continuous batching: what a request gets is what it gets alone, in any company, with few pages, after failures and cancellations."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from tiny_language_models import BrokenModel, TinyModel

from fusible.errors import ArgumentError
from fusible.models.generation import Engine, Event, Request, Sampling
from fusible.models.generation.sampling import choose_tokens
from fusible.models.prefix import common_prefix
from fusible.pytorch import KVCache

GREEDY = Sampling(0)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def texts(events: list[Event]) -> dict[int, list[int]]:
    made: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.token is not None:
            made[event.id].append(event.token)
    return dict(made)


@functools.cache
def alone(model: TinyModel, request: Request) -> list[int]:
    engine = Engine(model, sequences=1)
    engine.add(request)
    return texts(list(engine.run()))[0]


def mixed(count: int, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 60 tokens; greedy ones, and ones that draw."""
    draw = random.Random(seed)
    return [
        Request(
            tuple(draw.randrange(256) for _ in range(draw.randint(1, 60))),
            draw.randint(1, 30),
            GREEDY if i % 2 else Sampling(0.9, top_k=20, top_p=0.95, repetition_penalty=1.1, seed=i),
            frozenset(draw.sample(range(256), 3)),
        )
        for i in range(count)
    ]


def test_greedy_tokens_are_those_of_the_whole_text(model: TinyModel) -> None:
    prompt = (5, 9, 200)
    made = alone(model, Request(prompt, 20, GREEDY))
    assert model.whole([*prompt, *made]).argmax(-1)[2:-1].tolist() == made


@pytest.mark.parametrize(
    "settings",
    [
        {"sequences": 24},
        {"sequences": 3},
        {"sequences": 5, "tokens_per_step": 7},
        {"sequences": 5, "tokens_per_step": 1},
        {"sequences": 8, "page_size": 8, "capacity": 90},
        {"sequences": 8, "page_size": 8, "capacity": 90, "pages": 13},
        {"sequences": 8, "page_size": 1, "capacity": 90, "pages": 95, "tokens_per_step": 16},
    ],
)
def test_each_request_gets_what_it_gets_alone(model: TinyModel, settings: dict) -> None:
    requests = mixed(24)
    engine = Engine(model, **settings)
    events = []
    for request in requests:  # they come while others run
        engine.add(request)
        events += engine.step()
    events += engine.run()
    made = texts(events)
    for id, request in enumerate(requests):
        assert made[id] == alone(model, request), id
        (end,) = [event.ended for event in events if event.id == id and event.ended]
        assert end == ("stop" if made[id][-1] in request.stop_tokens else "length")
        assert len(made[id]) == request.max_tokens or end == "stop"
    assert not engine.busy
    assert (engine.counts.preempted > 0) == ("pages" in settings)


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(model: TinyModel) -> None:
    engine = Engine(model, sequences=2, tokens_per_step=10)
    quick = engine.add(Request((1, 2), 40, GREEDY))
    engine.step()
    long = engine.add(Request(tuple(range(90)), 2, GREEDY))
    steps = [engine.step() for _ in range(11)]
    assert all(any(event.id == quick for event in events) for events in steps)
    assert [any(event.id == long for event in events) for events in steps] == [False] * 9 + [True] * 2


def test_a_prompt_goes_on_from_one_that_began_alike(model: TinyModel) -> None:
    first = Request(tuple(range(50)), 10, GREEDY)
    engine = Engine(model, sequences=2)
    engine.add(first)
    made = texts(list(engine.run()))[0]
    further = Request((*first.prompt, *made[:5], 7, 8), 10, GREEDY)
    engine.add(further)
    again = texts(list(engine.run()))[1]
    assert engine.counts.reused == 55 and engine.counts.computed == 50 + 9 + 2 + 9
    assert again == alone(model, further)
    engine.add(first)  # its slot has more than that by now; the last token is computed for its logits
    assert texts(list(engine.run()))[2] == made and engine.counts.reused == 55 + 49


def _stepped(model: TinyModel, engine: Engine) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1)


def _loaded(model: TinyModel, engine: Engine) -> None:
    model.load_state_dict({name: -weight for name, weight in model.state_dict().items()})


def _assigned(model: TinyModel, engine: Engine) -> None:
    model.load_state_dict({name: -weight for name, weight in model.state_dict().items()}, assign=True)


def _of_one_block(model: TinyModel, engine: Engine) -> None:
    block = model.body[0]
    block.load_state_dict({name: -weight for name, weight in block.state_dict().items()})


def _uncounted(model: TinyModel, engine: Engine) -> None:
    for weight in model.parameters():
        weight.data.mul_(-1)
    engine.forget()


def _buffer(model: TinyModel, engine: Engine) -> None:
    model.get_buffer("scale").mul_(-1)


class ScaledModel(TinyModel):
    """One with a buffer that its keys and values hang on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def next_logits(self, tokens: torch.Tensor, seq_lens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        return self.body(self.get_buffer("scale") * self.embedding(tokens), seq_lens, cache)[seq_lens.cumsum(0) - 1]


@pytest.mark.parametrize("change", [_stepped, _loaded, _assigned, _of_one_block, _uncounted, _buffer])
@pytest.mark.parametrize("when", ["ended", "running", "being read"])
def test_of_weights_that_have_changed_nothing_is_used_again(change: Callable[[TinyModel, Engine], None], when: str) -> None:
    model = ScaledModel()
    engine = Engine(model, sequences=3, page_size=8, tokens_per_step=16)
    request = Request(tuple(range(40)), 8, GREEDY)
    engine.add(request)
    events = list(engine.run()) if when == "ended" else [event for _ in range(4 if when == "running" else 1) for event in engine.step()]
    change(model, engine)
    before = engine.counts.reused
    events += [event for _ in range(2) for event in _with_another(engine, request)]
    made, fresh = texts(events), Engine(model)
    fresh.add(request)
    assert made[1] == made[2] == texts(list(fresh.run()))[0]
    assert engine.counts.reused - before == 39  # of the two that began since, the second goes on from the first


def _with_another(engine: Engine, request: Request) -> list[Event]:
    engine.add(request)
    return list(engine.run())


def test_prompts_that_begin_alike_are_read_once(model: TinyModel) -> None:
    common = tuple(range(40))
    requests = [Request((*common, 100 + i, *range(i)), 8, GREEDY) for i in range(6)]
    engine = Engine(model, sequences=6, page_size=8, tokens_per_step=16)
    for request in requests:
        engine.add(request)
    events = list(engine.run())
    assert texts(events) == {id: alone(model, request) for id, request in enumerate(requests)}
    assert engine.counts.reused == 5 * 40
    unpaged = Engine(model, sequences=2)
    for request in requests:
        unpaged.add(request)
    assert texts(list(unpaged.run())) == texts(events) and unpaged.counts.reused == 4 * 40  # of what rests alone


@pytest.mark.parametrize("pages", [200, 24])
def test_prompts_of_few_beginnings_get_what_they_get_alone(model: TinyModel, pages: int) -> None:
    draw = random.Random(5)
    beginnings = [tuple(draw.randrange(256) for _ in range(draw.randint(9, 40))) for _ in range(3)]
    requests = []
    for _ in range(36):
        prompt = (*draw.choice(beginnings)[: draw.randint(8, 40)], *(draw.randrange(4) for _ in range(draw.randint(0, 9))))
        requests.append(Request(prompt, draw.randint(1, 30), GREEDY))
    engine, events = Engine(model, sequences=7, capacity=90, page_size=4, pages=pages, tokens_per_step=24), []
    for id, request in enumerate(requests):
        engine.add(request)
        events += engine.step()
        if id % 9 == 8:
            engine.cancel(id - 4)
    events += engine.run()
    made = texts(events)
    cancelled = {event.id for event in events if event.ended == "cancelled"}
    for id, request in enumerate(requests):
        if id in cancelled:
            assert made.get(id, []) == alone(model, request)[: len(made.get(id, []))]
        else:
            assert made[id] == alone(model, request), id
    assert engine.counts.reused > 150 and (engine.counts.preempted > 0) == (pages == 24)
    assert engine._slots.free_pages() == pages


def test_what_rests_gives_its_pages_to_who_needs_them(model: TinyModel) -> None:
    engine = Engine(model, sequences=4, page_size=4, capacity=40, pages=10)
    for start in (0, 100, 200):
        engine.add(Request(tuple(range(start, start + 20)), 5, GREEDY))
        list(engine.run())
    assert engine.counts.preempted == 0
    assert sum(-(-length // 4) for length in engine.cache.lengths) <= 10


def test_requests_that_are_cancelled_free_their_slots(model: TinyModel) -> None:
    engine = Engine(model, sequences=1)
    running, waiting, last = (engine.add(Request((1, 2, 3), 20, GREEDY)) for _ in range(3))
    engine.step()
    assert engine.waiting == (waiting, last)
    engine.cancel(running)
    engine.cancel(waiting)
    engine.cancel(99)
    events = list(engine.run())
    assert [event.id for event in events if event.ended == "cancelled"] == [running, waiting]
    assert texts(events) == {last: alone(model, Request((1, 2, 3), 20, GREEDY))}
    engine.cancel(last)
    assert not engine.busy


@pytest.mark.parametrize("settings", [{}, {"page_size": 4, "capacity": 90, "pages": 24}])
def test_a_step_that_failed_is_repeated(model: TinyModel, settings: dict) -> None:
    requests = mixed(8, seed=1)
    engine = Engine(BrokenModel(fails={1, 2, 5, 9, 20}), sequences=4, **settings)
    for request in requests:
        engine.add(request)
    extra = engine.add(requests[0])
    engine.cancel(extra)
    events, failures = [], 0
    while engine.busy:
        try:
            events += engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 5 and [event.id for event in events if event.ended == "cancelled"] == [extra]
    assert texts(events) == {id: alone(model, request) for id, request in enumerate(requests)}


def test_a_choice_that_failed_is_repeated(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request((1, 2, 3), 10, GREEDY)
    engine = Engine(model, sequences=2)
    engine.add(request)
    events = engine.step()
    with monkeypatch.context() as patched:
        patched.setattr("fusible.models.generation.engine.choose_tokens", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert texts(events + list(engine.run()))[0] == alone(model, request)


def test_logits_that_are_no_numbers_end_their_own_request(model: TinyModel) -> None:
    engine = Engine(BrokenModel(poison=77), sequences=3)
    good, bad = Request((1, 2, 3), 5, GREEDY), Request((1, 77), 5, GREEDY)
    for request in (good, bad, good):
        engine.add(request)
    events = list(engine.run())
    assert [(event.id, event.token) for event in events if event.ended == "failed"] == [(1, None)]
    assert texts(events) == dict.fromkeys((0, 2), alone(model, good))


@pytest.mark.parametrize("choice", [None, 256, 10**9])
def test_a_choice_that_is_no_token_ends_its_own_request(model: TinyModel, choice: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Request((1, 2, 3), 5, GREEDY), Request((1, 77), 5, Sampling(0.5, seed=8), logprobs=2)

    def choose(rows: torch.Tensor, samplers: list) -> list[int | None]:
        return [choice if one.sampling == bad.sampling else token for one, token in zip(samplers, choose_tokens(rows, samplers), strict=True)]

    engine = Engine(model, sequences=3)
    monkeypatch.setattr("fusible.models.generation.engine.choose_tokens", choose)
    for request in (good, bad, good):
        engine.add(request)
    events = list(engine.run())
    assert [(event.id, event.token) for event in events if event.ended == "failed"] == [(1, None)]
    assert texts(events) == dict.fromkeys((0, 2), alone(model, good))


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e-40}, {"temperature": 1e300}, {"repetition_penalty": 1e-40}, {"repetition_penalty": 1e300}], ids=str
)
def test_parameters_beyond_fp32_leave_others_alone(model: TinyModel, extreme: dict) -> None:
    engine = Engine(model, sequences=3)
    good = Request((1, 2, 3), 8, Sampling(0.9, seed=2))
    for request in (good, Request((5, 77), 8, Sampling(**{"seed": 0, **extreme})), good):
        engine.add(request)
    made = texts(list(engine.run()))
    assert made[0] == made[2] == alone(model, good) and len(made[1]) == 8
    if extreme.get("temperature") == 1e-40:
        assert made[1] == alone(model, Request((5, 77), 8, GREEDY))


def test_logprobs_are_those_of_the_model(model: TinyModel) -> None:
    engine = Engine(model, sequences=2)
    engine.add(Request((1, 2, 3), 4, Sampling(0.5, top_k=3, seed=0), logprobs=2))
    engine.add(Request((9,), 4, GREEDY))
    events = list(engine.run())
    tokens = texts(events)[0]
    wanted = model.whole([1, 2, 3, *tokens]).log_softmax(-1)[2:]
    told = [event.logprobs for event in events if event.id == 0]
    for row, token, logprobs in zip(wanted, tokens, told, strict=False):
        assert logprobs is not None and logprobs.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in logprobs.likeliest] == row.topk(2).indices.tolist()
    assert all(event.logprobs is None for event in events if event.id == 1)


def test_requests_that_could_never_end_are_refused(model: TinyModel) -> None:
    engine = Engine(model, sequences=2, capacity=40, page_size=4, pages=5)
    Engine(model, capacity=40).add(Request((1,) * 20, 20, GREEDY))
    engine.add(Request((1,) * 10, 10, GREEDY))
    for wrong, said in [
        (lambda: engine.add(Request((1,) * 11, 10, GREEDY)), "prompt and max_tokens: expected at most 20 tokens in all, got 11 tokens of the prompt"),
        (lambda: engine.add(Request((1, 256), 2, GREEDY)), "prompt: expected tokens from 0 to 255, got 256"),
        (lambda: Request((), 2), "prompt: expected at least one token"),
        (lambda: Request((1,), 0), "max_tokens: expected an integer of at least 1, got 0"),
        (lambda: Engine(model, capacity=300), "capacity: expected at most 256, the context of the model, got 300"),
        (lambda: Engine(model, tokens_per_step=0), "tokens_per_step: expected at least 1"),
    ]:
        with pytest.raises(ArgumentError, match=said):
            wrong()
    assert len(texts(list(engine.run()))[0]) == 10


def test_common_prefixes() -> None:
    draw = random.Random(0)
    for _ in range(200):
        a, b = ([draw.randrange(2) for _ in range(draw.randrange(9))] for _ in range(2))
        wanted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == wanted


def test_the_default_dtype_and_grad_mode_are_left_alone(model: TinyModel) -> None:
    engine = Engine(model, sequences=1)
    engine.add(Request((1,), 2, GREEDY))
    list(engine.run())
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
