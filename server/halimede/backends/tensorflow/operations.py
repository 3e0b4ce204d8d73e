"""What the operations of a graph do with its inputs. Works on GraphDef messages; imports nothing of TensorFlow."""

from collections.abc import Callable, Iterable
from typing import Any

from halimede.backends.tensorflow.model_file import node_of

_READERS = frozenset(
    {
        *("Assert", "Case", "HashTableV2", "If", "LookupTableFindV2", "LookupTableSizeV2", "PartitionedCall"),
        *(
            "Multinomial",
            "Print",
            "PrintV2",
            "RandomShuffle",
            "RandomStandardNormal",
            "RandomUniform",
            "RandomUniformInt",
        ),
        *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "StatefulPartitionedCall", "StatelessIf"),
        *("StatelessWhile", "TruncatedNormal", "VarHandleOp", "VarIsInitializedOp", "Variable", "VariableV2", "While"),
    }
)
"""Operations that TensorFlow calls stateful, and that neither write a state nor keep an input."""


def keepers(graph: Any, outputs: Iterable[str], is_stateful: Callable[[str], bool]) -> frozenset[str]:
    """The operations on which these outputs depend, in functions too, that may write a state or keep an input: all
    stateful ones but those known to do neither. `graph` is a GraphDef."""
    return frozenset(op for op in _used(graph, outputs) if op not in _READERS and is_stateful(op))


def _used(graph: Any, outputs: Iterable[str]) -> set[str]:
    nodes = {node.name: node for node in graph.node}
    functions = {function.signature.name: function for function in graph.library.function}
    used: set[str] = set()
    called: set[str] = set()
    waiting, seen = [node_of(name) for name in outputs], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in nodes:
            continue
        seen.add(name)
        node = nodes[name]
        used.add(node.op)
        called |= _called(node)
        waiting += [node_of(each) for each in node.input]
    calls, entered = [*called], set[str]()
    while calls:
        name = calls.pop()
        if name in entered or name not in functions:
            continue
        entered.add(name)
        for node in functions[name].node_def:
            used.add(node.op)
            calls += _called(node)
    return used


def _called(node: Any) -> set[str]:
    """The functions that a node may call: a node's operation may be a function itself."""
    names = {node.op}
    for attribute in node.attr.values():
        names.add(attribute.func.name)
        names |= {function.name for function in attribute.list.func}
    return names
