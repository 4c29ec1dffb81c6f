"""`engine.compile`: the same results from compiled glue, and who is refused it."""

from dataclasses import replace

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from baton.config.schema import EngineConfig
from baton.errors import ConfigError
from baton_engine.compiling import check_compile, compile_glue
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.models.config import load_spec
from baton_engine.models.decoder import Decoder
from baton_engine.models.loader import load_decoder
from tests.baton_engine.tiny_models import make_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    path = make_model(tmp_path_factory.mktemp("model"), "llama", num_layers=1)
    return load_decoder(path, load_spec(path), torch.float32, CPU, kernels=ReferenceKernels())


@pytest.mark.parametrize(
    ("config", "device", "why"),
    [
        (EngineConfig(compile=True), CPU, "for GPUs, not for cpu"),
        (EngineConfig(compile=True, deterministic=True), CUDA, "exclude each other"),
    ],
)
def test_where_it_means_nothing_it_is_refused_by_name(config, device, why):
    with pytest.raises(ConfigError, match=why) as raised:
        check_compile(config, device)
    assert raised.value.param == "engine.compile"


def test_a_gpu_takes_it_and_nobody_is_asked_who_does_not_want_it():
    check_compile(EngineConfig(compile=True), CUDA)
    check_compile(EngineConfig(deterministic=True), CPU)


def test_a_compiler_that_fails_is_told_as_a_setting_that_cannot_be_had(decoder, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand a long trace")

    monkeypatch.setattr(torch, "compile", lambda work, **options: fail)
    with pytest.raises(ConfigError, match=r"No working C\+\+ compiler found$") as raised:
        compile_glue(decoder)
    assert raised.value.param == "engine.compile"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_without_a_compiler_it_is_refused_by_name(decoder):
    with (
        fresh_cache(),
        inductor.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(ConfigError, match="torch cannot compile here"),
    ):
        compile_glue(replace(decoder, greedy=lambda logits: logits.max(-1).indices + 0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_what_is_compiled_gives_what_plain_torch_gives(decoder):
    compiled = compile_glue(decoder)
    with torch.inference_mode():
        for rows in (1, 2, 9):
            logits = torch.randn(rows, decoder.spec.vocab_size).round(decimals=1)
            logits[-1, 3] = float("nan") if rows > 2 else float("inf")
            assert torch.equal(compiled.greedy(logits), decoder.greedy(logits))
            positions = torch.randint(0, 100_000, (rows,))
            ours, theirs = compiled.rotary(positions), decoder.rotary(positions)
            torch.testing.assert_close(ours.cos, theirs.cos, atol=2e-7, rtol=0)
            torch.testing.assert_close(ours.sin, theirs.sin, atol=2e-7, rtol=0)
