"""YAML as operators write it: read safely, nothing given twice, and every fault a `yaml.YAMLError`."""

from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(text: str) -> object:
    """The document in `text`; None if it is empty.

    Raises:
        yaml.YAMLError: It is no YAML, a mapping has a key twice, of which PyYAML keeps the last,
            or a value is none of its type.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None


class _Loader(yaml.SafeLoader):
    # While it is composed: later a mapping holds what is merged into it, too, of which its own keys are to win.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                problem = f"{key.value} is given twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        # What PyYAML's constructors raise of `2026-13-45`, `!!int x`, `!!bool x`, `!!timestamp x`, and the like.
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
            problem = f"not a valid {node.tag.rpartition(':')[2]}; quote what is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error
