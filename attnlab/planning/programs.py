"""Compiled programs: their memory on each device, collectives and kernels, read from XLA's optimized HLO.

XLA's text is a list of computations. Only computations that the entry reaches count: a loop's body once per iteration,
a fusion as a part of its caller.
"""

import functools
import math
import re
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_PARTS = ("fusion", "fusion-start", "async-start")  # the computations that they call run in place
_FUSIONS = ("fusion", "fusion-start")
# Instructions without work of their own: the contents of a call or loop are counted instead.
_FREE = re.compile(
    "parameter|constant|get-tuple-element|tuple|bitcast|after-all|(partition|replica)-id|while|conditional|"
    "call|(call|async)-start|(call|async|fusion)-done"
)
_PARTIAL = ("bitcast", "dynamic-slice", "slice", "gather", "dynamic-update-slice")  # may read only part of operand 0
_FORWARDS = ("copy", "bitcast", "copy-done", "copy-start")  # the same value under another name


class Program(NamedTuple):
    """Memory, collectives and kernels of a compiled program; bytes per device."""

    arguments: int | None  # None where the compiler refused the program
    temporaries: int | None
    peak: int | None  # for a refused program, the size in the compiler's message, if any
    compile_seconds: float
    collectives: dict[str, list[int]]  # by kind: executions, and bytes of results (for a reduce-scatter, operands)
    unknown_loops: int  # loops whose number of iterations the text does not show; each counts as one iteration
    custom_calls: dict[str, int]  # executions by target
    kernels: dict[str, int]  # executions by name: Pallas kernels, and cuDNN's attention kernels
    refusal: str = ""  # the compiler's message if it refused the program for lack of memory
    launches: int = 0  # executed instructions that compute or copy; on GPUs, kernel launches
    moved: int = 0  # bytes that these instructions read and write


class Instruction(NamedTuple):
    """One line of HLO: `name = shape opcode(operands), attributes`, and the computation that contains it."""

    computation: str
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str
    is_root: bool


def compile(lowered: jax.stages.Lowered) -> Program:
    """Compile a lowered program for the devices of its lowering; a lack of memory is returned as `refusal`."""
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return refused(str(error), time.perf_counter() - start)
    return read(compiled, time.perf_counter() - start)


def read(compiled: jax.stages.Compiled, seconds: float = 0.0) -> Program:
    """Read the memory, collectives and kernels of a compiled program."""
    memory, computations = compiled.memory_analysis(), parse(compiled.as_text())
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes  # outputs in donated arguments are free
    parts = (memory.argument_size_in_bytes, outputs, memory.temp_size_in_bytes, memory.generated_code_size_in_bytes)
    # The compiler's peak accounts for buffer lifetimes, but GPUs allocate all temporaries at once and so need the sum.
    # On TPUs, small programs have a peak above the sum. The larger of the two is safe for both.
    peak = max(sum(parts), getattr(memory, "peak_memory_in_bytes", 0))
    counts, unknown_loops = collectives(computations)
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, peak
    return Program(*sizes, seconds, counts, unknown_loops, *custom_calls(computations), "", *work(computations))


def refused(message: str, seconds: float) -> Program:
    """Describe a program that the compiler refused with RESOURCE_EXHAUSTED; the message may name the memory needed."""
    size = r"([\d.]+)\s?([KMGT]?)i?B?"
    forms = rf"\({size}\) exceeds available HBM", rf"Used {size} of .* hbm"  # libtpu since 2026, and before
    size_match = next((match for form in forms if (match := re.search(form, message))), None)
    needed = None if size_match is None else round(float(size_match[1]) * 1024 ** " KMGT".index(size_match[2] or " "))
    sentence = message.strip().splitlines()[0].split("RESOURCE_EXHAUSTED:", 1)[-1].strip()
    return Program(None, None, needed, seconds, {}, 0, {}, {}, sentence)


def parse(text: str) -> dict[str, list[Instruction]]:
    """Parse the instructions of each computation of an HLO text; the entry computation is named "ENTRY"."""
    computations, current = {}, None
    for line in text.splitlines():
        if re.match(r"\}(, execution_thread=|$)", line):  # Pallas' metadata has lines that begin with "}}"
            current = None
        elif current is None:
            header = re.match(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$", line)
            if header and not line.startswith("HloModule"):
                current = "ENTRY" if header[1] else header[2]
                computations[current] = []
        elif instruction := _instruction(current, line):
            computations[current].append(instruction)
    return computations


def _instruction(computation: str, line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    rest = line[end:].lstrip()
    opcode = re.match(r"([\w\-]+)\(", rest)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    operands, attributes = rest[opcode.end() : close], rest[close + 1 :]
    return Instruction(computation, head[2], line[start:end], opcode[1], operands, attributes, bool(head[1]))


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def collectives(computations: dict[str, list[Instruction]]) -> tuple[dict[str, list[int]], int]:
    """Count executions and bytes of each kind of collective, and loops of unknown length."""
    counts, loops = {}, set()
    for block, times in _blocks(computations, "ENTRY", 1, loops):
        channels = set()  # a TPU splits one collective over several fusions, to overlap it with products
        for instruction in block:
            kind = _kind(instruction)
            channel = re.search(r"channel_id=(\d+)", instruction.attributes)
            if kind is None or (channel and (kind, channel[1]) in channels):
                continue
            if channel:
                channels.add((kind, channel[1]))
            count = counts.setdefault(kind, [0, 0])
            count[0] += times
            count[1] += times * _moved(instruction, kind, block)
    return {kind: counts[kind] for kind in KINDS if kind in counts}, len(loops)


def custom_calls(computations: dict[str, list[Instruction]]) -> tuple[dict[str, int], dict[str, int]]:
    """Count executions of custom calls by target, and of kernels by name: `splash_mha_fwd_residuals`, `cudnn_fmha…`."""
    targets, kernels = {}, {}
    for block, times in _blocks(computations, "ENTRY", 1, set()):
        for instruction in block:
            target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
            if instruction.opcode != "custom-call" or target is None:
                continue
            targets[target[1]] = targets.get(target[1], 0) + times
            name = _kernel(target[1], instruction.name)
            if name:
                kernels[name] = kernels.get(name, 0) + times
    return targets, kernels


def work(computations: dict[str, list[Instruction]]) -> tuple[int, int]:
    """Count launches, and the bytes of their operands and results; of a sliced array, only the slice counts."""
    launches = moved = 0
    fusions = (each for body in computations.values() for each in body if each.opcode in _FUSIONS)
    fused = {_called(each, "calls")[0] for each in fusions}
    for block, times in _blocks(computations, "ENTRY", 1, set()):
        for each in block:
            if _FREE.fullmatch(each.opcode) or each.computation in fused:
                continue
            names, body, kernel = set(_names(each.operands)), computations[each.computation], [each]
            if is_fusion := each.opcode in _FUSIONS:
                kernel = body = computations[_called(each, "calls")[0]]
                names = {x.name for x in body if x.opcode == "parameter"}
            # The start of a copy or collective reads the operands; the end writes the results.
            if not each.opcode.endswith("-done"):
                launches += times
                moved += times * sum(_read(kernel, x) for x in body if x.name in names)
            if is_fusion or not each.opcode.endswith("-start"):
                moved += times * _written(body, _root(body) if is_fusion else each)
    return launches, moved


def _read(kernel: list[Instruction], value: Instruction) -> int:
    """Bytes of an operand that a kernel's instructions read."""
    whole, read = _device_bytes(value.shape), 0
    for user in kernel:
        first, *others = _names(user.operands) or [""]
        if value.name in others or (value.name == first and user.opcode not in _PARTIAL):
            return whole
        if value.name == first and user.opcode != "dynamic-update-slice":  # it writes in place
            read += _read(kernel, user) if user.opcode == "bitcast" else _device_bytes(user.shape)
    return min(read, whole)


def _written(body: list[Instruction], root: Instruction) -> int:
    """Bytes of a kernel's results."""
    names = _names(root.operands)
    if root.opcode in ("tuple", "bitcast"):
        return sum(_written(body, _origin(body, name)) for name in names)
    return _device_bytes(_origin(body, names[1]).shape if root.opcode == "dynamic-update-slice" else root.shape)


def _device_bytes(shape: str) -> int:
    """Bytes of the arrays in a device's main memory: not in another memory space, S(1) on TPUs and S(5) on GPUs."""
    return array_bytes(re.sub(r"\w+\[[^\]]*\]\{[^}]*S\(\d+\)\}", "", shape))


def _kernel(target: str, name: str) -> str:
    if target == "tpu_custom_call":  # XLA names the instruction after the Pallas kernel
        return re.sub(r"(\.(\d+|clone|remat\d*))+$", "", name)
    is_attention = "fmha" in target or target.startswith("mosaic_gpu")
    return target.strip("_").replace("$", "_") if is_attention else ""


def _blocks(computations, name, times: int, loops: set) -> Iterator[tuple[list[Instruction], int]]:
    """Yield each block of consecutive instructions and how often it runs; add loops of unknown length to `loops`."""
    block = list(_in_place(computations, name))
    yield block, times
    for instruction in block:
        if instruction.opcode == "while":
            trips = trip_count(computations, instruction)
            if trips is None:
                loops.add(instruction.name)
            for body in _called(instruction, "body"):
                yield from _blocks(computations, body, times * (1 if trips is None else trips), loops)
        elif instruction.opcode in ("call", "call-start", "conditional"):
            branches = ("to_apply", "calls", "branch_computations", "true_computation", "false_computation")
            for branch in _called(instruction, *branches):
                yield from _blocks(computations, branch, times, loops)


def _in_place(computations, name) -> Iterator[Instruction]:
    """Yield the instructions of a computation and of its fusions."""
    for instruction in computations.get(name, ()):
        yield instruction
        if instruction.opcode in _PARTS:
            for called in _called(instruction, "calls"):
                yield from _in_place(computations, called)


def _called(instruction: Instruction, *attributes: str) -> list[str]:
    """Return the computations in attributes like `body=%x` and `branch_computations={%x, %y}`."""
    values = re.findall(rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|%?[\w.\-]+)", instruction.attributes)
    return [name for names in values for name in re.findall(r"[\w.\-]+", names)]


def trip_count(computations: dict[str, list[Instruction]], loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None if that is not a constant in the text."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    # On TPUs the number follows from a counter: its start, its increment in the body, and the constant that bounds it.
    condition, body = (computations.get(name[0], []) for name in (_called(loop, "condition"), _called(loop, "body")))
    caller = computations.get(loop.computation, [])
    test, end = _root(condition), _root(body)
    if test is None or end is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, limit = (_origin(condition, name) for name in _names(test.operands))
    index = _index(counter)
    start = _element(caller, _names(loop.operands)[0], index)
    increment = _element(body, end.name, index)
    if increment is None or increment.opcode != "add":
        return None
    terms = [_origin(body, name) for name in _names(increment.operands)]
    step = next((value for term in terms if (value := _constant(term)) is not None), None)
    low, high = _constant(start), _constant(limit)
    if not any(_index(term) == index for term in terms) or None in (index, step, low, high) or step < 1:
        return None
    return max(0, math.ceil((high - low) / step))


def _root(instructions: list[Instruction]) -> Instruction | None:
    return next((instruction for instruction in instructions if instruction.is_root), None)


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", operands)


def _origin(instructions: list[Instruction], name: str) -> Instruction | None:
    """The instruction that computes a value, skipping copies and bitcasts."""
    origin = next((instruction for instruction in instructions if instruction.name == name), None)
    while origin is not None and origin.opcode in _FORWARDS:
        name = _names(origin.operands)[0]
        origin = next((instruction for instruction in instructions if instruction.name == name), None)
    return origin


def _element(instructions: list[Instruction], name: str, index: int | None) -> Instruction | None:
    """The instruction that computes an element of a tuple."""
    origin = _origin(instructions, name)
    if origin is None or origin.opcode != "tuple" or index is None:
        return None
    return _origin(instructions, _names(origin.operands)[index])


def _index(element: Instruction | None) -> int | None:
    """Index of the element that an instruction takes from the loop's tuple."""
    if element is None or element.opcode != "get-tuple-element":
        return None
    return int(re.search(r"index=(\d+)", element.attributes)[1])


def _constant(instruction: Instruction | None) -> int | None:
    is_integer = instruction is not None and instruction.opcode == "constant"
    return int(instruction.operands) if is_integer and re.fullmatch(r"-?\d+", instruction.operands) else None


def _kind(instruction: Instruction) -> str | None:
    """The kind of a collective; None for other instructions, and for a `-done`, because its `-start` is counted."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
        return "reduce-scatter"  # on TPUs it is a fusion of an all-reduce and a slice
    return kind if kind in KINDS else None


def _moved(instruction: Instruction, kind: str, block: Iterable[Instruction]) -> int:
    """Bytes of a collective's results, or of a reduce-scatter's operands."""
    if kind == "reduce-scatter" and instruction.opcode != "all-reduce":
        inline = array_bytes(instruction.operands)  # older texts repeat the shapes of operands
        if inline:
            return inline
        names = set(_names(instruction.operands))
        return sum(
            array_bytes(other.shape)
            for other in block
            if other.computation == instruction.computation and other.name in names
        )
    shape = instruction.shape
    # The -start of a pair returns (operands, results, …); an all-reduce-start may return the results alone.
    if instruction.opcode.endswith("-start") and (kind != "all-reduce" or shape.startswith("((")):
        shape = _elements(shape)[1]
    return array_bytes(shape)


def _elements(shape: str) -> list[str]:
    """The elements of a tuple's shape: "((f32[2], s32[]), f32[4])" → ["(f32[2], s32[])", "f32[4]"]."""
    elements, start, depth = [], 1, 0
    for match in re.finditer(r"[(){}\[\],]", shape):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        if (match[0] == "," and depth == 1) or depth == 0:
            elements.append(shape[start : match.start()].strip())
            start = match.end()
    return elements


def array_bytes(shape: str) -> int:
    """Bytes of all arrays in a shape, without the padding of a device's layout."""
    arrays = re.findall(r"\b([a-z]+\d*\w*)\[([\d,<= ]*)\]", shape)
    return sum(math.ceil(_bits(kind) * _size(dimensions) / 8) for kind, dimensions in arrays)


def _size(dimensions: str) -> int:
    return math.prod(int(size) for size in re.findall(r"\d+", dimensions))


@functools.cache
def _bits(kind: str) -> int:
    """Bits of an element: pred 8, bf16 16, f8e4m3fn 8, s4 4; HLO tokens have none."""
    number = re.match(r"[a-z]+(\d+)", kind)
    return 8 if kind == "pred" else int(number[1]) if number else 0
