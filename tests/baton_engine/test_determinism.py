"""The same request, the same bits: tokens and log-probabilities compared exactly,
over everything that may happen around it.
"""

from dataclasses import dataclass, replace
from threading import Event

import pytest
import torch

from baton import native
from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import ConfigError
from baton.generation import Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton_engine.build import build_engine
from baton_engine.host import ThreadEngineHost
from baton_engine.kernels import select
from baton_engine.kernels.cpu.matmul import multiplies_int8, reads_bfloat16
from baton_engine.kernels.cpu.product_choice import (
    AUTO,
    Bfloat16Product,
    choose_product,
    rounding,
)
from baton_engine.kernels.select import check_deterministic
from baton_engine.messages import Generate, Prefill, Receive, Release, StepEvents
from baton_engine.models.config import load_spec, pinned
from baton_engine.models.linear import ROWS, Linear, fix_rows, pack
from tests.baton_engine.sampled import Sampled, all_events, by_sequence
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.baton_engine.whole_engine import WholeEngine, hand_off

ASKED = SeqId("asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to hold and compute a model."""

    family: str = "llama"
    stored: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    quantization: str = "none"


KINDS = {
    "float32": Kind(),
    "window": Kind(family="mistral"),
    "head norms": Kind(family="qwen3"),
    "bfloat16 stored": Kind(stored=torch.bfloat16),
    "bfloat16": Kind(stored=torch.bfloat16, dtype=torch.bfloat16),
    "int8": Kind(quantization="int8"),
}


@pytest.fixture(scope="module", params=KINDS)
def engines(request, tmp_path_factory):
    """Makes engines of one kind."""
    kind = KINDS[request.param]
    if kind.quantization == "int8" and not multiplies_int8():
        pytest.skip("this processor has no AVX-512 VNNI, or the kernels are not built")
    path = tmp_path_factory.mktemp("model")
    # Widths that no vector divides, for what is left over is computed by other instructions; and one so large that
    # oneDNN divides its sum by the number of rows.
    make_model(
        path,
        kind.family,
        hidden_size=72,
        head_dim=24,
        intermediate_size=1536,
        dtype=kind.stored,
    )

    def make(**changes) -> WholeEngine:
        return WholeEngine(path, dtype=kind.dtype, quantization=kind.quantization, **changes)

    return make


def asking(tokens, *, max_tokens=12, seed=7, **sampling) -> Prompt:
    """Drawn at random, so that every probability counts, with the five likeliest tokens' log-probabilities."""
    params = {"temperature": 0.9, "top_p": 0.95, "logprobs": 5, "ignore_eos": True} | sampling
    return Prompt(
        prompt_tokens=tuple(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, **params),
    )


def text(length: int, seed: int) -> list[int]:
    return random_prompts(2, length, seed=seed)[1]


WANTED = asking(text(75, 1))


@pytest.fixture(scope="module")
def alone(engines):
    """What the request gets when nothing else is there."""
    engine = engines()
    engine.tell(Generate(seq_id=ASKED, prompt=WANTED))
    engine.run()
    return engine.tokens(ASKED)


def others(count: int):
    return [
        Generate(seq_id=SeqId(f"o{n}"), prompt=asking(text(5 + 23 * n, 10 + n), seed=n))
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [1, 4, 6])
def test_beside_others(engines, alone, count):
    engine = engines()
    engine.tell(*others(count))
    engine.step()
    engine.step()
    engine.tell(Generate(seq_id=ASKED, prompt=WANTED))
    engine.run()
    assert engine.tokens(ASKED) == alone


@pytest.mark.parametrize("budget", [9, 23, 40])
def test_in_other_chunks(engines, alone, budget):
    engine = engines(budget=budget)
    engine.tell(*others(3), Generate(seq_id=ASKED, prompt=WANTED), *others(5)[3:])
    engine.run()
    assert engine.tokens(ASKED) == alone


def test_after_a_prefix_hit(engines, alone):
    engine = engines()
    engine.tell(Generate(seq_id=SeqId("before"), prompt=asking(text(75, 1)[:50], seed=1)))
    engine.run()
    engine.tell(Generate(seq_id=ASKED, prompt=WANTED))
    engine.run()
    assert engine.cached_tokens(ASKED) == [48]
    assert engine.tokens(ASKED) == alone


def test_after_a_hit_on_what_was_generated_before(engines):
    """The next turn of a conversation, whose cached pages were filled token by token."""
    first = asking(text(20, 2), max_tokens=40)
    engine, fresh = engines(), engines()
    engine.tell(Generate(seq_id=SeqId("turn"), prompt=first))
    engine.run()
    answer = [token.token for token in engine.tokens(SeqId("turn"))]
    second = asking([*first.prompt_tokens, *answer, *text(9, 3)])
    for each in (engine, fresh):
        each.tell(Generate(seq_id=ASKED, prompt=second))
        each.run()
    assert (engine.cached_tokens(ASKED), fresh.cached_tokens(ASKED)) == ([48], [0])
    assert engine.tokens(ASKED) == fresh.tokens(ASKED)


def test_after_a_preemption(engines, alone):
    engine = engines(num_blocks=8)
    first = asking(text(30, 4), max_tokens=60, seed=2)
    engine.tell(Generate(seq_id=SeqId("first"), prompt=first))
    engine.step()
    engine.tell(Generate(seq_id=ASKED, prompt=WANTED))
    engine.run()
    assert engine.scheduler.load().preemptions > 0
    assert engine.tokens(ASKED) == alone


def test_resumed_elsewhere(engines, alone):
    """As after the loss of a worker: prompt and what was generated so far are computed as one text."""
    engine = engines(budget=31)
    had = tuple(token.token for token in alone[:5])
    resumed = Prompt(
        prompt_tokens=WANTED.prompt_tokens, output_tokens=had, sampling=WANTED.sampling
    )
    engine.tell(Generate(seq_id=ASKED, prompt=resumed), *others(2))
    engine.run()
    assert engine.tokens(ASKED) == alone[5:]


def test_prefilled_here_and_decoded_there(engines, alone):
    source, target = engines(budget=33), engines(budget=50)
    source.tell(Prefill(seq_id=ASKED, prompt=WANTED), *others(3))
    target.tell(*others(4), Receive(seq_id=ASKED, prompt=WANTED))
    blocks: list[int] = []
    while not source.tokens(ASKED):
        plan, events = source.scheduler.schedule(0.0)
        source.events += events
        assert plan is not None
        rows = [row for row in plan.rows if row.seq.seq_id == ASKED]
        blocks = list(rows[0].seq.blocks) if rows else blocks
        result = source.runner.execute(plan)
        source.events += by_sequence(source.scheduler.update_from_output(plan, result, 0.0))
    for _ in range(3):
        target.step()
    hand_off(source, target, ASKED, blocks)
    source.tell(Release(seq_id=ASKED))
    target.run()
    assert source.tokens(ASKED) + target.tokens(ASKED) == alone


def test_the_prompts_own_probabilities(engines):
    wanted = asking(text(60, 5), prompt_logprobs=3, max_tokens=2)
    found = []
    for budget in (256, 14):
        engine = engines(budget=budget)
        engine.tell(*others(2), Generate(seq_id=ASKED, prompt=wanted))
        engine.run()
        found.append(engine.scores(ASKED))
    assert len(found[0]) == 59
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("had", [1, 30, 70])
def test_without_the_mode_a_text_that_goes_on_elsewhere_has_the_bits_of_one_left_alone(
    tmp_path, kind: str, had: int
):
    """Where products give a row the same bits whatever their number:
    what was generated before is attended as when it was decoded.
    """
    chosen = KINDS[kind]
    if not _products_keep_rows_apart(chosen):
        pytest.skip("this processor's products depend on the number of rows")
    path = make_model(tmp_path, "llama", dtype=chosen.stored)
    wanted = asking(text(75, 1), max_tokens=80)

    def run(asked: Prompt, *commands: Generate) -> tuple[TokenSample, ...]:
        engine = WholeEngine(
            path, deterministic=False, dtype=chosen.dtype, quantization=chosen.quantization
        )
        engine.tell(Generate(seq_id=ASKED, prompt=asked), *commands)
        engine.run()
        return engine.tokens(ASKED)

    calm = run(wanted, *others(2))
    before = tuple(token.token for token in calm[:had])
    assert run(replace(wanted, output_tokens=before)) == calm[had:]


def _products_keep_rows_apart(kind: Kind) -> bool:
    if kind.quantization == "int8":
        return multiplies_int8()
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(kind.dtype)
    chosen = choose_product(AUTO, torch.device("cpu"))
    product, x = pack(Linear(weight=weight), product=chosen), torch.randn(200, 64).to(kind.dtype)
    whole = product(x)
    return all(torch.equal(product(x[:rows]), whole[:rows]) for rows in (1, 2, 8, 20, 100))


def test_without_the_mode_bits_do_depend_on_the_batch(tmp_path):
    """Otherwise nothing above would show anything."""
    path = make_model(tmp_path, "llama", hidden_size=72, head_dim=24)
    found = []
    for budget in (256, 23):
        engine = WholeEngine(path, deterministic=False, budget=budget)
        engine.tell(*others(3), Generate(seq_id=ASKED, prompt=WANTED))
        engine.run()
        found.append(engine.tokens(ASKED))
    assert found[0] != found[1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 320), (576, 576), (1536, 577)])
def test_a_row_of_a_product_does_not_depend_on_the_others(inputs, outputs, threads):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product = fix_rows(pack(Linear(weight=weight)))
        row = torch.randn(1, inputs, generator=generator)
        expected = product(row)
        for rows in (2, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5):
            x = torch.randn(rows, inputs, generator=generator)
            place = rows // 2
            x[place] = row[0]
            assert torch.equal(product(x)[place], expected[0])
        assert product(torch.empty(0, inputs)).shape == (0, outputs)
    finally:
        torch.set_num_threads(before)


def test_products_over_panels_need_no_fixing():
    if not reads_bfloat16():
        pytest.skip("this processor has no AVX-512, or the kernels are not built")
    weight = torch.randn(64, 64).bfloat16()
    panels = pack(Linear(weight=weight), product=Bfloat16Product.PANELS)
    assert fix_rows(panels) is panels


def test_kv_of_the_mode_is_not_taken_for_other_kv(tmp_path):
    spec = load_spec(make_model(tmp_path, "llama"))
    kinds = {spec, *(pinned(spec, kind) for kind in ("panels", "onednn", "sm80", "sm90"))}
    assert len({kind.fingerprint for kind in kinds}) == 5


class HostBytes:
    """Host memory that nobody shares."""

    device = None

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.view = memoryview(bytearray(size_bytes))
        self.address = 0


class Memory:
    """Gives `HostBytes`."""

    def allocate(self, size_bytes: int, gpu: int | None = None) -> HostBytes:
        return HostBytes(size_bytes)


def test_an_engine_with_the_setting_is_built_so(tmp_path):
    path = make_model(tmp_path, "llama", hidden_size=72, head_dim=24, intermediate_size=1536)
    wanted = asking(text(60, 1))
    found = []
    for budget in (256, 19):
        built = build_engine(
            ModelConfig(model=str(path)),
            EngineConfig(
                device="cpu",
                deterministic=True,
                max_num_batched_tokens=budget,
                kv_cache_memory_bytes=1 << 20,
            ),
            secret=bytes(32),
            memory=Memory(),
            sink=None,
            progress=lambda what, part: None,
        )
        assert "-deterministic-" in built.layout.model_fingerprint
        found.append(_drawn(built.host, wanted))
    assert found[0] == found[1]


def _drawn(host: ThreadEngineHost, wanted: Prompt) -> list[TokenSample]:
    tokens: list[TokenSample] = []
    done = Event()

    def listen(told: StepEvents) -> None:
        for event in all_events(told):
            if isinstance(event, Sampled):
                tokens.extend(event.tokens)
                if tokens[-1].finish is not None:
                    done.set()

    host.attach(listen)
    host.start()
    host.submit(Generate(seq_id=SeqId("test/asked"), prompt=wanted))
    assert done.wait(30)
    host.close()
    return tokens


def test_a_gpu_takes_it_with_tritons_kernels_of_16_bits_and_refuses_it_by_name_without(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(select, "find_spec", lambda name: name)
    check_deterministic(cuda, torch.bfloat16)
    with pytest.raises(ConfigError, match="float16 or bfloat16, not in float32") as raised:
        check_deterministic(cuda, torch.float32)
    assert raised.value.param == "engine.deterministic"
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs Triton"):
        check_deterministic(cuda, torch.bfloat16)


def test_another_build_of_the_cpu_kernels_or_of_torch_gives_other_bits_by_name(monkeypatch):
    monkeypatch.setattr(native, "built_variant", lambda library: native.GENERIC)
    monkeypatch.setattr(native, "digest", lambda library: "one")
    names = [rounding(Bfloat16Product.ONEDNN)]
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    names.append(rounding(Bfloat16Product.ONEDNN))
    monkeypatch.setattr(native, "digest", lambda library: "another")
    names.append(rounding(Bfloat16Product.ONEDNN))
    assert len(set(names)) == 3
    assert len({name.rpartition("-")[0] for name in names}) == 1


def test_compressed_weights_give_the_bits_of_plain_ones_by_name(monkeypatch):
    monkeypatch.setattr(native, "built_variant", lambda library: native.GENERIC)
    monkeypatch.setattr(native, "digest", lambda library: "one")
    for plain in (Bfloat16Product.PANELS, Bfloat16Product.PAIRS):
        assert rounding(Bfloat16Product(f"compressed_{plain}")) == rounding(plain)
    assert rounding(Bfloat16Product.PANELS) != rounding(Bfloat16Product.PAIRS)


def test_other_triton_kernels_give_other_bits_by_name(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason='pip install "baton-serve[triton]"')
    kernel = tmp_path / "triton" / "kernel.py"
    kernel.parent.mkdir()
    monkeypatch.setattr(select, "__file__", str(tmp_path / "select.py"))
    builds = []
    for text in ("", "x = 1"):
        kernel.write_text(text)
        builds.append(select.triton_build())
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    builds.append(select.triton_build())
    assert len(set(builds)) == 3
