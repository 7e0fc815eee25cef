"""Build an ONNX graph node by node, weights beside it in one file that the runtime maps.

A thin layer over onnx.helper: each call adds a node and returns its output's name. Weights go straight to
the side file, page-aligned, so that building needs the memory of one tensor and running needs none for
tables that are only gathered from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import MissingDependency

ALIGN_BYTES = 4096
OPSET = 17  # LayerNormalization is native; ReduceMean still takes axes as an attribute
IR_VERSION = 9
NARROW = (("INT4", "int4"), ("FLOAT8", "fp8"), ("INT8", "int8"))


class GraphBuilder:
    """Context manager: `with GraphBuilder(...) as g: ...; g.finish(inputs, outputs)`."""

    def __init__(self, folder: Path, name: str) -> None:
        try:
            import onnx
        except ImportError:
            raise MissingDependency("onnx", "embedded", "building a model graph") from None
        self._onnx = onnx
        self._folder, self._name = folder, name
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []
        self._side = (folder / f"{name}.weights").open("wb")
        self._count = 0

    def __enter__(self) -> GraphBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._side.close()

    def weight(self, name: str, values: npt.NDArray[Any]) -> str:
        """Write `values` to the side file and declare it."""
        values = np.ascontiguousarray(values)
        self._side.write(b"\0" * (-self._side.tell() % ALIGN_BYTES))
        offset = self._side.tell()
        self._side.write(values.data)
        proto = self._onnx.TensorProto(
            name=name,
            data_type=self._onnx.helper.np_dtype_to_tensor_dtype(values.dtype),
            dims=values.shape,
            data_location=self._onnx.TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", f"{self._name}.weights"),
            ("offset", str(offset)),
            ("length", str(values.nbytes)),
        ):
            proto.external_data.add(key=key, value=value)
        self._initializers.append(proto)
        return name

    def constant(self, name: str, values: Any, dtype: type[np.generic]) -> str:
        """A small constant, kept inside the graph file."""
        self._initializers.append(
            self._onnx.numpy_helper.from_array(np.asarray(values, dtype), name)
        )
        return name

    def add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        return self.split(kind, *inputs, outputs=(output,), **attributes)[0]

    def split(
        self, kind: str, *inputs: str, outputs: Sequence[str | None], **attributes: Any
    ) -> list[str]:
        """As `add`, for a node with several outputs."""
        self._count += 1
        names = [
            name or f"{kind.lower()}_{self._count}_{slot}" for slot, name in enumerate(outputs)
        ]
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def finish(
        self,
        inputs: Sequence[tuple[str, Sequence[str]]],
        outputs: Sequence[tuple[str, Sequence[Any]]],
        *,
        architecture: str,
        context: int,
    ) -> Path:
        """Check and write the graph; inputs are int64, outputs float32. architecture, context (longest
        sequence) stand in its metadata, for whoever opens it."""
        helper, tensor = self._onnx.helper, self._onnx.TensorProto
        graph = helper.make_graph(
            self._nodes,
            self._name,
            [helper.make_tensor_value_info(name, tensor.INT64, shape) for name, shape in inputs],
            [helper.make_tensor_value_info(name, tensor.FLOAT, shape) for name, shape in outputs],
            self._initializers,
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="fabric-pipelines",
        )
        helper.set_model_props(model, {"architecture": architecture, "context": str(context)})
        self._side.flush()
        path = self._folder / f"{self._name}.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))
        self._onnx.checker.check_model(str(path))
        return path


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a graph says of itself. weight_quantisation: "none", or "int8", "fp8", "int4" by the narrowest type
    among its weights; dim: numbers of one output's vector, 0 where the graph leaves it open."""

    architecture: str
    context: int
    weight_quantisation: str
    outputs: tuple[str, ...]
    dim: int


def graph_facts(path: Path) -> GraphFacts:
    """RuntimeError when the graph is not one of ours: it lacks its metadata."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    says = {entry.key: entry.value for entry in model.metadata_props}
    kinds = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    try:
        return GraphFacts(
            says["architecture"],
            int(says["context"]),
            next(
                (word for prefix, word in NARROW if any(prefix in kind for kind in kinds)), "none"
            ),
            tuple(value.name for value in model.graph.output),
            int(model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value),
        )
    except KeyError as fault:
        raise RuntimeError(f"{path} says nothing of its {fault.args[0]}") from fault


def truncated(path: Path, last: str) -> bytes:
    """The graph file at `path` cut behind the node that makes `last`: outputs named after it and weights that
    only it needs are gone. Nodes are in order of computation, since GraphBuilder wrote them."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    end = 1 + next(index for index, node in enumerate(graph.node) if last in node.output)
    del graph.node[end:]
    made = {name for node in graph.node for name in node.output}
    used = {name for node in graph.node for name in node.input}
    outputs = [value for value in graph.output if value.name in made]
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.output[:]
    del graph.initializer[:]
    graph.output.extend(outputs)
    graph.initializer.extend(weights)
    return bytes(model.SerializeToString())


def pooled(path: Path, layers: Sequence[int]) -> bytes:
    """The packed trunk at `path` with pooling behind it: beside ids, seg, pos it takes weight[T] (float32, of each
    token in its own sequence's result) and rows[S] (int64, 0..S-1), and gives pooled_<layer>[S, dim] for each
    of `layers`. 1/length in `weight` makes a mean, 1 at the last token only picks it. What leaves a device is
    then a row a sequence. Weights stay in the trunk's side file."""
    import onnx

    helper, tensor = onnx.helper, onnx.TensorProto
    chosen = list(dict.fromkeys(layers))
    model = onnx.load_from_string(truncated(path, f"hidden_{max(chosen)}"))
    graph = model.graph
    dims = {value.name: value.type.tensor_type.shape.dim[1].dim_value for value in graph.output}
    zero = onnx.numpy_helper.from_array(np.zeros((), np.float32), "pool_zero")
    first, second = (
        onnx.numpy_helper.from_array(np.array([axis]), f"pool_axis_{axis}") for axis in (0, 1)
    )
    graph.initializer.extend([zero, first, second])
    steps = [
        ("Unsqueeze", ["rows", "pool_axis_1"], "pool_rows"),
        ("Unsqueeze", ["seg", "pool_axis_0"], "pool_seg"),
        ("Equal", ["pool_rows", "pool_seg"], "pool_held"),
        ("Unsqueeze", ["weight", "pool_axis_0"], "pool_weight"),
        ("Where", ["pool_held", "pool_weight", "pool_zero"], "pool"),
        *(("MatMul", ["pool", f"hidden_{layer}"], f"pooled_{layer}") for layer in chosen),
    ]
    graph.node.extend(helper.make_node(kind, inputs, [name]) for kind, inputs, name in steps)
    graph.input.extend(
        [
            helper.make_tensor_value_info("weight", tensor.FLOAT, ["T"]),
            helper.make_tensor_value_info("rows", tensor.INT64, ["S"]),
        ]
    )
    del graph.output[:]
    graph.output.extend(
        helper.make_tensor_value_info(
            f"pooled_{layer}", tensor.FLOAT, ["S", dims[f"hidden_{layer}"]]
        )
        for layer in chosen
    )
    return bytes(model.SerializeToString(deterministic=True))
