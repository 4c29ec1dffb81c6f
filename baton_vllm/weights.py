"""A digest of the weights that vLLM loads: two fine-tunes of one model have files of the same names and sizes, and
pages of one must not be taken for the other's.
"""

from hashlib import blake2b
from pathlib import Path

from baton_engine.models.checkpoint import fingerprint, read_files
from baton_vllm.adapters import digest_files

_OTHERS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""In which weights lie where none are in safetensors."""


def digest_weights(directory: Path) -> str:
    """A digest of the weights in a model's directory: a sample of every tensor (`baton_engine.models.checkpoint`) where
    they are in safetensors, all bytes of other files. Where there are none, as of a model that vLLM holds elsewhere
    (`download_dir`), the commit if it is a snapshot of a hub's.

    Takes all files, as which ones vLLM reads depends on their names, an index and its settings; and so is to be asked
    once vLLM has loaded the model, for it may have fetched further ones.

    Raises:
        ModelLoadError: A file is no safetensors.
    """
    files = sorted(directory.glob("*.safetensors"))
    if files:
        parts = [f"{file.name} {fingerprint(read_files(directory, [file]), {})}" for file in files]
    elif files := sorted(file for pattern in _OTHERS for file in directory.glob(pattern)):
        parts = [digest_files(*files)]
    else:
        parts = [directory.name] if directory.parent.name == "snapshots" else []
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
