"""The flags of `baton serve`: which setting each one gives. Their names are those that vLLM's users know."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from baton.config.rules import (
    CONTENT_FORMATS,
    DEVICES,
    DIRECTORIES,
    DTYPES,
    ENGINES,
    EVICTIONS,
    KV_DTYPES,
    LOG_FORMATS,
    LOG_LEVELS,
    POLICIES,
    QUANTIZATIONS,
)
from baton.config.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag.

    Attributes:
        names: As typed; the first one is used in errors.
        path: The setting that it gives.
        help: For `--help`.
        metavar: What stands for the value in `--help`.
        is_list: Takes several values, after one flag or one flag each.
        is_any_text: Nothing that stands after it could be refused as a value.
        is_switch: Takes none: given, it stands for true.
    """

    names: tuple[str, ...]
    path: str
    help: str
    metavar: str
    is_list: bool = False
    is_any_text: bool = False
    is_switch: bool = False


def _flag(*names: str, path: str, help: str, metavar: str = "N") -> Flag:
    return Flag(names=names, path=path, help=help, metavar=metavar)


def _list(name: str, *, path: str, help: str, metavar: str, is_any_text: bool = False) -> Flag:
    return Flag(
        names=(name,),
        path=path,
        help=help,
        metavar=metavar,
        is_list=True,
        is_any_text=is_any_text,
    )


def _switch(name: str, *, path: str, help: str) -> Flag:
    return Flag(names=(name,), path=path, help=help, metavar="", is_switch=True)


FLAGS: tuple[Flag, ...] = (
    _flag("--prefill-workers", path="cluster.prefill_workers", help="prefill workers (default 1)"),
    _flag("--decode-workers", path="cluster.decode_workers", help="decode workers (default 1)"),
    _flag(
        "--hybrid-workers",
        path="cluster.hybrid_workers",
        help="workers that do both; alone, they replace the other two kinds",
    ),
    _flag(
        "--worker-metrics-port",
        path="cluster.metrics_port",
        help="first of one port per worker where it answers Prometheus, on the loopback interface",
        metavar="PORT",
    ),
    _flag("--host", path="router.host", help="interface of HTTP", metavar="ADDRESS"),
    _flag("--port", path="router.port", help="port of HTTP; 0 takes a free one", metavar="PORT"),
    _list(
        "--api-key",
        path="router.api_keys",
        help="keys that clients must send one of; better given as BATON_ROUTER_API_KEYS",
        metavar="KEY",
        is_any_text=True,
    ),
    _flag(
        "--chat-template",
        path="router.chat_template",
        help="file of the template that conversations are written by, instead of the model's own",
        metavar="FILE",
    ),
    _flag(
        "--chat-template-content-format",
        path="router.chat_template_content_format",
        help="|".join(CONTENT_FORMATS) + "; how the template is given the contents of messages",
        metavar="NAME",
    ),
    _flag(
        "--tool-call-parser",
        path="router.tool_call_parser",
        help="how the model writes calls of tools, such as hermes; auto for what its chat template writes",
        metavar="NAME",
    ),
    _flag(
        "--reasoning-parser",
        path="router.reasoning_parser",
        help="how the model sets its reasoning apart, such as qwen3; auto for what its chat template knows",
        metavar="NAME",
    ),
    _flag(
        "--root-path",
        path="router.root_path",
        help="path under which a proxy shows the server, such as /llm",
        metavar="PATH",
    ),
    _flag("--policy", path="router.policy", help="|".join(POLICIES), metavar="NAME"),
    _list(
        "--served-model-name",
        path="model.served_model_name",
        help="names by which clients may ask for the model",
        metavar="NAME",
        is_any_text=True,
    ),
    _list(
        "--lora-modules",
        path="model.lora_modules",
        help="LoRA adapters that are served by their names, with --engine vllm",
        metavar="NAME=PATH",
    ),
    _flag("--revision", path="model.revision", help="revision on the hub", metavar="REVISION"),
    _flag("--dtype", path="model.dtype", help="|".join(DTYPES), metavar="NAME"),
    _flag(
        "--quantization",
        path="model.quantization",
        help="|".join(QUANTIZATIONS) + "; how the weights are held",
        metavar="NAME",
    ),
    _flag("--max-model-len", path="model.max_model_len", help="tokens of prompt and output"),
    _flag("--seed", path="model.seed", help="for what requests leave open"),
    _flag("--max-num-seqs", path="engine.max_num_seqs", help="sequences that run at once"),
    _flag(
        "--max-num-batched-tokens",
        path="engine.max_num_batched_tokens",
        help="token budget of one step",
    ),
    _flag("--engine", path="engine.kind", help="|".join(ENGINES), metavar="NAME"),
    _flag("--device", path="engine.device", help="|".join(DEVICES), metavar="NAME"),
    _flag("--block-size", path="engine.block_size", help="tokens per KV page (power of two)"),
    _flag(
        "--gpu-memory-utilization",
        path="engine.gpu_memory_utilization",
        help="share of the GPU's memory for weights and KV",
        metavar="SHARE",
    ),
    _flag(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        path="engine.kv_cache_memory_bytes",
        help="KV pages of each worker, such as 4GiB",
        metavar="SIZE",
    ),
    _flag(
        "--kv-cache-dtype",
        path="engine.kv_cache_dtype",
        help="|".join(KV_DTYPES) + "; what KV pages hold",
        metavar="NAME",
    ),
    _switch(
        "--compile",
        path="engine.compile",
        help="fuse what a step computes between its kernels by torch.compile; on GPUs",
    ),
    _switch(
        "--deterministic",
        path="engine.deterministic",
        help="the same bits for a request whatever else is computed with it; slower",
    ),
    _flag(
        "--speculative-config",
        path="engine.speculative_config",
        help='guess tokens that one step confirms: {"method": "ngram", "num_speculative_tokens": 5}'
        ' or {"method": "suffix"} or {"method": "draft_model", "model": PATH, "num_speculative_tokens": 3}'
        ' or, with a head, "eagle3"',
        metavar="JSON",
    ),
    _flag(
        "--tbt-target",
        path="engine.tbt_target_s",
        help="seconds between tokens that are kept while prompts are computed beside them",
        metavar="SECONDS",
    ),
    _list(
        "--transfer-backends",
        path="transfer.backends",
        help="ways to hand KV off, preferred first: cuda_ipc|shm|nixl|ucx",
        metavar="NAME",
    ),
    _flag(
        "--pool",
        path="pool.enabled",
        help="whether this host's workers share their KV through a pool (default false)",
        metavar="true|false",
    ),
    _flag(
        "--pool-memory",
        path="pool.memory_bytes",
        help="memory of this host's pool; default: a quarter of what is free, 4GiB at most",
        metavar="SIZE",
    ),
    _flag(
        "--pool-address",
        path="pool.address",
        help="where the pool's node listens, host:port for nodes of other hosts",
        metavar="ADDRESS",
    ),
    _flag(
        "--pool-ssd-dir",
        path="pool.ssd_dir",
        help="directory of the pool's SSD tier, which survives restarts",
        metavar="DIRECTORY",
    ),
    _flag("--pool-ssd", path="pool.ssd_bytes", help="bytes of that tier", metavar="SIZE"),
    _flag("--pool-redis", path="pool.redis_url", help="of the pool's directory", metavar="URL"),
    _flag(
        "--pool-directory",
        path="pool.directory",
        help="|".join(DIRECTORIES) + "; nodes of several hosts need redis",
        metavar="NAME",
    ),
    _flag("--pool-eviction", path="pool.eviction", help="|".join(EVICTIONS), metavar="NAME"),
    _flag(
        "--runtime-dir",
        path="cluster.runtime_dir",
        help="directory of the cluster's sockets",
        metavar="DIRECTORY",
    ),
    _flag("--log-level", path="log.level", help="|".join(LOG_LEVELS), metavar="NAME"),
    _flag("--log-format", path="log.format", help="|".join(LOG_FORMATS), metavar="NAME"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag. Values stay text here: the configuration reads and checks them, in its one way."""
    for flag in FLAGS:
        text = flag.help.replace("%", "%%")
        if flag.is_switch:
            parser.add_argument(
                *flag.names, dest=flag.path, help=text, action="store_const", const="true"
            )
            continue
        parser.add_argument(
            *flag.names,
            dest=flag.path,
            help=text,
            metavar=flag.metavar,
            action="append" if flag.is_list else "store",
            nargs="+" if flag.is_list else None,
        )


def given_settings(arguments: argparse.Namespace) -> list[Setting]:
    """The settings that the command line gives."""
    return [
        Setting(path=flag.path, value=value, source=flag.names[0], is_text=True)
        for flag in FLAGS
        if (value := _value(flag, arguments)) is not None
    ]


def _value(flag: Flag, arguments: argparse.Namespace) -> object:
    given = getattr(arguments, flag.path)
    if flag.is_list and given is not None:
        return [value for values in given for value in values]
    return given


def may_hold_more(arguments: argparse.Namespace) -> Iterator[str]:
    """Flags of which one was given several values that may be any text: the last of them may have been meant as an
    argument of its own.
    """
    for flag in FLAGS:
        given = getattr(arguments, flag.path)
        if flag.is_any_text and any(len(values) > 1 for values in given or ()):
            yield flag.names[0]
