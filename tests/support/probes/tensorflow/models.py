"""Writes the models of the TensorFlow backend's tests, and what TensorFlow itself answers for them.

    python models.py FOLDER LIBRARY

It runs in a process of its own: the whole of TensorFlow takes seconds and hundreds of megabytes.
"""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

ROWS = np.random.default_rng(7).standard_normal((5, 16)).astype(np.float32)


class Network(tf.Module):
    """Two layers, and the first of them alone under a second signature."""

    def __init__(self):
        numbers = np.random.default_rng(3)
        self.first = tf.Variable(numbers.standard_normal((16, 64)).astype(np.float32))
        self.second = tf.Variable(numbers.standard_normal((64, 4)).astype(np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.float32, name="x")])
    def scores(self, x):
        hidden = tf.nn.relu(tf.matmul(x, self.first))
        return {"scores": tf.nn.softmax(tf.matmul(hidden, self.second)), "same": tf.identity(x)}

    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.float32, name="x")])
    def hidden(self, x):
        return {"hidden": tf.nn.relu(tf.matmul(x, self.first))}


class Mixed(tf.Module):
    """Strings, bfloat16, a scalar and a tensor of unknown rank."""

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, None], tf.string, name="text"),
            tf.TensorSpec([None], tf.bfloat16, name="brain"),
            tf.TensorSpec([], tf.float32, name="scalar"),
            tf.TensorSpec(None, tf.int64, name="whole"),
        ]
    )
    def __call__(self, text, brain, scalar, whole):
        return {
            "twice": tf.strings.join([text, text]),
            "joined": tf.strings.reduce_join(text),
            "double": brain + brain,
            "next": scalar + 1,
            "negative": -whole,
        }


class Summing(tf.Module):
    """A model of sequences with implicit state: the sum of an input and the one before. The state is an input itself."""

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 8192], tf.float32, name="x"),
            tf.TensorSpec([None, 1], tf.float32, name="start"),
            tf.TensorSpec([None, 8192], tf.float32, name="before"),
        ]
    )
    def __call__(self, x, start, before):
        return {"sum": x + before * (1 - start), "after": tf.identity(x)}


class Remembering(tf.Module):
    """Keeps the last input and counts calls: a state in the graph."""

    def __init__(self):
        self.last = tf.Variable(tf.zeros([8192]))
        self.calls = tf.Variable(0)

    @tf.function(input_signature=[tf.TensorSpec([8192], tf.float32, name="x")])
    def __call__(self, x):
        before = tf.identity(self.last.read_value())
        with tf.control_dependencies([before]):
            self.last.assign(x)
        return {"before": before, "calls": self.calls.assign_add(1)}


def plain():
    """A frozen graph: `y` is `x` times a matrix. `unused` is in it for nothing."""
    x = tf.compat.v1.placeholder(tf.float32, [None, 16], name="x")
    tf.compat.v1.placeholder_with_default(np.float32(0), [], name="unused")
    weights = tf.constant(np.random.default_rng(5).standard_normal((16, 3)).astype(np.float32))
    tf.matmul(x, weights, name="y")


def ragged():
    """`sums` of the numbers of each request in `values`; they end where `ends` says."""
    values = tf.compat.v1.placeholder(tf.float32, [None], name="values")
    ends = tf.compat.v1.placeholder(tf.float32, [None], name="ends")
    totals = tf.gather(tf.cumsum(values), tf.cast(ends, tf.int32) - 1)
    tf.expand_dims(totals - tf.concat([[0.0], totals[:-1]], 0), 1, name="sums")


def special(library):
    """A graph with an operation of its own, a variable that an operation sets, and inputs with defaults.

    `y` is half of `x`, at most `limit`, plus the variable; `number` is the text `digits` as a number, and "" is none.
    """
    x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
    limit = tf.compat.v1.placeholder_with_default(np.float32([[1e9]]), [None, 1], name="limit")
    digits = tf.compat.v1.placeholder(tf.string, [None], name="digits")
    offset = tf.compat.v1.Variable(np.float32(0.25), use_resource=True, name="offset")
    tf.group(offset.initializer, name="init")
    tf.add(tf.minimum(library.halimede_half(x=x), limit), offset, name="y")
    tf.strings.to_number(digits, name="number")


def main(folder, library):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    network = Network()
    signatures = {"serving_default": network.scores, "features": network.hidden}
    tf.saved_model.save(network, str(folder / "network"), signatures=signatures)
    loaded = tf.saved_model.load(str(folder / "network"))
    for signature in loaded.signatures.values():
        for name, value in signature(x=tf.constant(ROWS)).items():
            np.save(folder / f"{name}.npy", value.numpy())
    for name, module in {"mixed": Mixed(), "summing": Summing(), "remembering": Remembering()}.items():
        tf.saved_model.save(module, str(folder / name), signatures=module.__call__)
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        plain()
        np.save(folder / "y.npy", session.run("y:0", {"x:0": ROWS}))
    (folder / "plain.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
    with tf.Graph().as_default() as graph:
        ragged()
    (folder / "ragged.graphdef").write_bytes(graph.as_graph_def().SerializeToString())
    with tf.Graph().as_default() as graph:
        special(tf.load_op_library(str(library)))
    (folder / "special.graphdef").write_bytes(graph.as_graph_def().SerializeToString())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
