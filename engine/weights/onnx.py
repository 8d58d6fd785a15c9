"""Reads weights from ONNX (protobuf) and ORT (flatbuffer) files, and gives them the names of transformers checkpoints.

`tickertape pull` uses it to convert packages of Moonshine, Whisper and the turn detector (`registry.py`). Only
initializers and the names around each node are read. This takes a few wire types of two documented formats, so neither
runtime is a dependency. Quantised tensors have a scale and a zero point and are dequantised here, once.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

# Element types of weights, as numbered by TensorProto.DataType.
_UINT8, _INT8, _INT32 = 2, 3, 6
_DTYPES = {1: np.float32, _UINT8: np.uint8, _INT8: np.int8, _INT32: np.int32, 7: np.int64}


class BadOnnxFile(ValueError):
    """The file is not readable, or lacks expected tensors."""


@dataclass(slots=True)
class Graph:
    """The parts of a graph that are needed, those of nested graphs included."""

    # Weights by name.
    tensors: dict[str, Array] = field(default_factory=dict)
    # For every node, the names of its inputs and of its outputs.
    nodes: list[tuple[list[str], list[str]]] = field(default_factory=list)


def read_graph(data: bytes) -> Graph:
    """Read either format; an ORT file is known by its bytes 4 to 7. Raises BadOnnxFile."""
    graph = Graph()
    try:
        if data[4:8] == b"ORTM":
            session = _Table(data, struct.unpack_from("<I", data, 0)[0])
            _read_ort_graph(session.table(_ORT_SESSION_MODEL).table(_ORT_MODEL_GRAPH), graph)
        else:
            for number, value in _fields(data):
                if number == _MODEL_GRAPH:
                    _read_onnx_graph(value, graph)
    except (struct.error, IndexError, ValueError, KeyError, TypeError) as error:
        raise BadOnnxFile(f"not a readable ONNX or ORT file ({error})") from error
    if not graph.tensors:
        raise BadOnnxFile("no tensors in the file: not an ONNX or ORT model")
    return graph


# ONNX: nested protobuf fields. The numbers are those of the fields in onnx.proto.

_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_INPUT, _NODE_OUTPUT, _NODE_ATTRIBUTE = 1, 2, 5
_ATTRIBUTE_GRAPH = 6
_TENSOR_DIMS, _TENSOR_DATA_TYPE, _TENSOR_NAME = 1, 2, 8
_TENSOR_FLOAT_DATA, _TENSOR_INT32_DATA, _TENSOR_RAW_DATA = 4, 5, 9


def _varint(data: memoryview, offset: int) -> tuple[int, int]:
    """The variable-length integer at `offset`, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset += 1
        if byte < 0x80:
            return value, offset
        shift += 7


def _fields(message: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and value of each field: length-delimited values as bytes, varints as ten little-endian bytes. Fields of
    fixed length are skipped."""
    data = memoryview(message)
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, offset = _varint(data, offset)
            yield number, memoryview(value.to_bytes(10, "little"))
        elif wire == 2:
            length, offset = _varint(data, offset)
            if offset + length > len(data):
                raise ValueError("a field extends past the end of the file")
            yield number, data[offset : offset + length]
            offset += length
        elif wire in (1, 5):
            offset += 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")


def _read_onnx_graph(message: memoryview, graph: Graph) -> None:
    for number, value in _fields(message):
        if number == _GRAPH_INITIALIZER:
            name, tensor = _onnx_tensor(value)
            if tensor is not None:
                graph.tensors[name] = tensor
        elif number == _GRAPH_NODE:
            inputs, outputs = [], []
            for field_number, content in _fields(value):
                if field_number == _NODE_INPUT:
                    inputs.append(str(content, "utf-8"))
                elif field_number == _NODE_OUTPUT:
                    outputs.append(str(content, "utf-8"))
                elif field_number == _NODE_ATTRIBUTE:
                    # A nested graph is the branch of an If node.
                    for attribute, body in _fields(content):
                        if attribute == _ATTRIBUTE_GRAPH:
                            _read_onnx_graph(body, graph)
            graph.nodes.append((inputs, outputs))


def _onnx_tensor(message: memoryview) -> tuple[str, Array | None]:
    """Name and values; None for a type that weights do not have, or without values."""
    dims: list[int] = []
    dtype, name = 0, ""
    raw: memoryview | None = None
    for number, value in _fields(message):
        if number == _TENSOR_DIMS:
            dims.append(int.from_bytes(value, "little"))
        elif number == _TENSOR_DATA_TYPE:
            dtype = int.from_bytes(value, "little")
        elif number == _TENSOR_NAME:
            name = str(value, "utf-8")
        elif number in (_TENSOR_RAW_DATA, _TENSOR_FLOAT_DATA):
            # Both are packed little-endian.
            raw = value
        elif number == _TENSOR_INT32_DATA and dtype in (_UINT8, _INT8, _INT32):
            raw = memoryview(b"".join(_packed(value, np.dtype(_DTYPES[dtype]).itemsize)))
    if raw is None or dtype not in _DTYPES:
        return name, None
    return name, np.frombuffer(raw, _DTYPES[dtype]).reshape(dims)


def _packed(values: memoryview, size: int) -> Iterator[bytes]:
    """Packed varints as little-endian integers of `size` bytes."""
    offset = 0
    while offset < len(values):
        value, offset = _varint(values, offset)
        yield (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


# ORT: flatbuffer tables. The numbers are the vtable offsets of the fields in ort.fbs.

_ORT_SESSION_MODEL = 6
_ORT_MODEL_GRAPH = 18
_ORT_GRAPH_INITIALIZERS, _ORT_GRAPH_NODES = 4, 8
_ORT_TENSOR_NAME, _ORT_TENSOR_DIMS, _ORT_TENSOR_DATA_TYPE, _ORT_TENSOR_RAW_DATA = 4, 8, 10, 12
_ORT_NODE_INPUTS, _ORT_NODE_OUTPUTS, _ORT_NODE_ATTRIBUTES = 20, 22, 24
_ORT_ATTRIBUTE_GRAPH = 18


class _Table:
    """A flatbuffer table at `position` in the file. `offset` names a field: its offset in the vtable. An absent field
    is empty, 0 or an error."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position

    def _field(self, offset: int) -> int | None:
        """Position of a field in the file; None if the table does not have it."""
        vtable = self._position - struct.unpack_from("<i", self._data, self._position)[0]
        if offset >= struct.unpack_from("<H", self._data, vtable)[0]:
            return None
        relative: int = struct.unpack_from("<H", self._data, vtable + offset)[0]
        return self._position + relative if relative else None

    def _follow(self, position: int) -> int:
        """The position to which the reference at `position` points."""
        target: int = position + struct.unpack_from("<I", self._data, position)[0]
        return target

    def table(self, offset: int) -> _Table:
        position = self._field(offset)
        if position is None:
            raise ValueError("a part of the model is missing")
        return _Table(self._data, self._follow(position))

    def tables(self, offset: int) -> list[_Table]:
        return [_Table(self._data, self._follow(position)) for position in self._vector(offset, 4)]

    def strings(self, offset: int) -> list[str]:
        return [self._string(self._follow(position)) for position in self._vector(offset, 4)]

    def string(self, offset: int) -> str:
        position = self._field(offset)
        return "" if position is None else self._string(self._follow(position))

    def int32(self, offset: int) -> int:
        position = self._field(offset)
        return 0 if position is None else int(struct.unpack_from("<i", self._data, position)[0])

    def int64s(self, offset: int) -> list[int]:
        return [struct.unpack_from("<q", self._data, position)[0] for position in self._vector(offset, 8)]

    def raw(self, offset: int) -> memoryview:
        positions = self._vector(offset, 1)
        return memoryview(self._data)[positions.start : positions.stop]

    def has(self, offset: int) -> bool:
        return self._field(offset) is not None

    def _string(self, position: int) -> str:
        length = struct.unpack_from("<I", self._data, position)[0]
        return self._data[position + 4 : position + 4 + length].decode()

    def _vector(self, offset: int, size: int) -> range:
        """Positions of the elements of a vector field, which have `size` bytes each."""
        position = self._field(offset)
        if position is None:
            return range(0)
        start = self._follow(position)
        length = struct.unpack_from("<I", self._data, start)[0]
        return range(start + 4, start + 4 + length * size, size)


def _read_ort_graph(table: _Table, graph: Graph) -> None:
    for tensor in table.tables(_ORT_GRAPH_INITIALIZERS):
        dtype, raw = _DTYPES.get(tensor.int32(_ORT_TENSOR_DATA_TYPE)), tensor.raw(_ORT_TENSOR_RAW_DATA)
        if dtype is not None and len(raw):
            shape = tensor.int64s(_ORT_TENSOR_DIMS)
            graph.tensors[tensor.string(_ORT_TENSOR_NAME)] = np.frombuffer(raw, dtype).reshape(shape)
    for node in table.tables(_ORT_GRAPH_NODES):
        graph.nodes.append((node.strings(_ORT_NODE_INPUTS), node.strings(_ORT_NODE_OUTPUTS)))
        for attribute in node.tables(_ORT_NODE_ATTRIBUTES):
            if attribute.has(_ORT_ATTRIBUTE_GRAPH):
                _read_ort_graph(attribute.table(_ORT_ATTRIBUTE_GRAPH), graph)


# Moonshine's names. Some weights have theirs; a projection is identified by the node that uses it.

_PROJECTION = re.compile(r"/layers\.(\d+)/(self_attn|encoder_attn|mlp)/(\w+)/(?:MatMul|Add)_output_0")
# Names that differ between the releases from which the files were exported.
_RENAMED_LAYERS = {"dense": "o_proj", "up_proj": "fc1", "down_proj": "fc2"}
_NAMED_LAYER = re.compile(
    r"^(?:model\.decoder\.)?(layers\.\d+\.[\w.]+?\.(?:weight|bias)|norm\.weight|layer_norm\.weight)$"
)


def moonshine_tensors(encoder: bytes, decoder: bytes) -> dict[str, npt.NDArray[np.float32]]:
    """All of Moonshine's weights in float32, under transformers' names."""
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for side, data in (("encoder", encoder), ("decoder", decoder)):
        graph = read_graph(data)
        prefix = f"model.{side}."
        for name in graph.tensors:
            if plain := _NAMED_LAYER.match(name.split("_merged_")[0]):
                tensors[prefix + _rename(plain[1])] = _dequantised(graph, name)
        for inputs, outputs in graph.nodes:
            found = _PROJECTION.search(outputs[0]) if outputs else None
            weight = next((name for name in inputs if name.endswith("_quantized") and name in graph.tensors), None)
            if found and weight is not None:
                layer, block, projection = found.groups()
                key = f"{prefix}layers.{layer}.{block}.{_RENAMED_LAYERS.get(projection, projection)}.weight"
                # MatMul stores (in, out), Linear stores (out, in).
                tensors[key] = np.ascontiguousarray(_dequantised(graph, weight).T)
        if side == "encoder":
            tensors.update({prefix + key: value for key, value in _convolutions(graph).items()})
        else:
            name = next(
                (name for name in graph.tensors if "embed_tokens.weight" in name and graph.tensors[name].ndim == 2), ""
            )
            if not name:
                raise BadOnnxFile("no token embedding in the decoder")
            tensors["model.decoder.embed_tokens.weight"] = _dequantised(graph, name)
    return tensors


def _rename(name: str) -> str:
    return ".".join(_RENAMED_LAYERS.get(part, part) for part in name.split("."))


def _convolutions(graph: Graph) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of the three convolutions and of the norm after the first, by name within the encoder."""
    tensors = {}
    for name in graph.tensors:
        named = re.match(r"^(conv[123]\.(?:weight|bias))(?:_quantized|_add_tensor)?$", name)
        if named:
            tensors[named[1]] = _dequantised(graph, name)
    # The norm after the first convolution was exported as a multiplication and an addition.
    for part, output in (("weight", "/groupnorm/Mul_output_0"), ("bias", "/groupnorm/Add_output_0")):
        for inputs, outputs in graph.nodes:
            if outputs and outputs[0] == output:
                tensors[f"groupnorm.{part}"] = next(
                    _dequantised(graph, name).reshape(-1) for name in inputs if name in graph.tensors
                )
    return tensors


# Whisper's names. Weights of matrix products have lost theirs and are identified by the node that uses them.

_NAMED = re.compile(r"([\w.]+\.(?:weight|bias))(?:_merged_\d+)?(?:_quantized)?")
_PRODUCT = re.compile(r"/(layers\.\d+)/((?:(?:self_attn|encoder_attn)/)?\w+)/MatMul_output_0")


def whisper_tensors(encoder: bytes, decoder: bytes) -> dict[str, npt.NDArray[np.float32]]:
    """All of Whisper's weights in float32, under transformers' names."""
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for side, data in (("encoder", encoder), ("decoder", decoder)):
        graph, prefix = read_graph(data), f"model.{side}."
        for name in graph.tensors:
            if named := _NAMED.fullmatch(name.removeprefix(prefix)):
                tensors[prefix + named[1]] = _dequantised(graph, name)
        for inputs, outputs in graph.nodes:
            found = _PRODUCT.search(outputs[0]) if outputs else None
            weight = next((name for name in inputs if name.endswith("_quantized") and name in graph.tensors), None)
            if found and weight is not None:
                # MatMul stores (in, out), Linear stores (out, in).
                key = f"{prefix}{found[1]}.{found[2].replace('/', '.')}.weight"
                tensors[key] = np.ascontiguousarray(_dequantised(graph, weight).T)
    return tensors


# The turn detector's names. Biases have kept theirs; a matrix is identified by the bias that is added to its product.

# Prefix of the model's tensors, and suffix of what a node that dequantises a tensor is called.
_MODEL_PREFIX = "inner."
_DEQUANTISED_SUFFIX = "_DequantizeLinear_Output"


def turn_detector_tensors(data: bytes) -> dict[str, npt.NDArray[np.float32]]:
    """All weights of the turn detector in float32, under transformers' names. Raises BadOnnxFile.

    The file also has fixed 8-bit scales for activations. They are not read: the engine's 8-bit layers compute the scale
    of each row.
    """
    graph = read_graph(data)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    try:
        for name in graph.tensors:
            plain = name.removesuffix("_quantized").removeprefix(_MODEL_PREFIX)
            if name.startswith(_MODEL_PREFIX) and plain.endswith((".weight", ".bias")):
                tensors[plain] = _dequantised(graph, name, rows=True)
        for key, matrix in _named_products(graph):
            # MatMul stores (in, out), Linear stores (out, in).
            tensors[key] = np.ascontiguousarray(_dequantised(graph, matrix).T)
    except (KeyError, ValueError) as error:
        raise BadOnnxFile(f"not the turn detector that this version knows ({error})") from error
    return tensors


def _named_products(graph: Graph) -> Iterator[tuple[str, str]]:
    """Transformers' name of each matrix that has lost it, and its name in the graph."""
    biases = {
        name: other
        for inputs, _ in graph.nodes
        for name in inputs
        for other in inputs
        if other.startswith(_MODEL_PREFIX)
    }
    queries: dict[str, str] = {}
    unnamed: list[tuple[str, str]] = []
    for inputs, outputs in graph.nodes:
        matrix = inputs[1].removesuffix(_DEQUANTISED_SUFFIX) + "_quantized" if len(inputs) == 2 else ""
        if matrix not in graph.tensors:
            continue
        bias = biases.get(outputs[0] + _DEQUANTISED_SUFFIX)
        if bias is None:
            unnamed.append((inputs[0], matrix))
            continue
        key = bias.removeprefix(_MODEL_PREFIX).removesuffix("bias") + "weight"
        if ".q_proj." in key:
            queries[inputs[0]] = key
        yield key, matrix
    # Projections to keys have no bias; their input is that of the projection to queries.
    for activations, matrix in unnamed:
        yield queries[activations].replace("q_proj", "k_proj"), matrix


def _dequantised(graph: Graph, name: str, rows: bool = False) -> npt.NDArray[np.float32]:
    """A tensor in float32. `rows`: scales belong to rows (the first axis), otherwise to columns (the last axis). A
    single scale belongs to the whole tensor."""
    values = graph.tensors[name]
    if not name.endswith("_quantized"):
        return np.ascontiguousarray(values, np.float32)
    # The scale of a quantised bias is named after its full name, "_quantized" included.
    stem = name if name + "_scale" in graph.tensors else name.removesuffix("_quantized")
    if not {stem + "_scale", stem + "_zero_point"} <= graph.tensors.keys():
        raise BadOnnxFile(f"{name} has no scale or no zero point")
    quantised = values.astype(np.float32)
    scale = graph.tensors[stem + "_scale"].astype(np.float32)
    zero = graph.tensors[stem + "_zero_point"].astype(np.float32)
    if graph.tensors[stem + "_zero_point"].dtype == np.float32:
        # Convolutions are stored as multiply and add; matrix products subtract an integer zero point first.
        return quantised * scale + zero
    if rows and scale.ndim:
        shape = (-1, *[1] * (values.ndim - 1))
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (quantised - zero) * scale
