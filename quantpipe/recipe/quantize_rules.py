"""What must hold inside a recipe's ``quantize`` section, and between it and ``calibration``. Loads nothing.

Works on the plain data like ``rules``: malformed values are left to the schema.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from quantpipe.recipe.document import KeyPath, Problem, value_at

# Bits per weight of each scheme, and which round activations too.
SCHEME_BITS = {"w3a16": 3, "w4a16": 4, "w8a16": 8, "w8a8": 8}
ACTIVATION_SCHEMES = ("w8a8",)
KV_MODES_FROM_DATA = ("int8_static",)
TRANSFORMS = ("smoothquant", "awq", "rotate", "k_smooth")


def find_quantize_conflicts(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Everything about quantization that contradicts something else in the recipe."""
    yield from _calibration_problems(data)
    yield from _transform_problems(data)
    yield from _stack_problems(data)
    yield from _solver_problems(data)
    yield from _allocate_problems(data)


def _calibration_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    has_calibration = data.get("calibration") is not None
    is_evaluated_on = value_at(data, ("evaluate", "divergence", "holdout")) is True
    if data.get("quantize") is None:
        if has_calibration and not is_evaluated_on:
            text = "nothing is quantized, so nothing is calibrated; remove it, or add a quantize section"
            yield Problem(("calibration",), text, at_key=True, needs=("quantize",))
        return
    readers = list(_data_readers(data))
    if not has_calibration:
        for path, reader in readers:
            text = f"{reader} reads calibration data; add a calibration section"
            yield Problem(path, text, needs=("calibration",))
    elif not readers and not is_evaluated_on and _names_are_legal(data):
        solver = value_at(data, ("quantize", "solver", "name"))
        text = f"solver {solver!r} reads no data; remove the calibration section"
        yield Problem(("calibration",), text, at_key=True, needs=("quantize",))  # what is misspelt there may read data


def reads_data(data: Mapping[str, Any]) -> bool:
    """Whether anything in a recipe's ``quantize`` section needs calibration data."""
    return any(_data_readers(data))


def _names_are_legal(data: Mapping[str, Any]) -> bool:
    """Whether solver and transforms are written so that it is known what reads data."""
    transforms = value_at(data, ("quantize", "transforms"))
    is_list = transforms is None or (isinstance(transforms, list) and len(transforms) == len(_transforms(data)))
    return is_list and isinstance(value_at(data, ("quantize", "solver", "name")), str)


def _data_readers(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """What of the section needs calibration data, and where it is written."""
    solver, scales = (value_at(data, ("quantize", "solver", key)) for key in ("name", "scales"))
    if solver == "gptq":
        yield ("quantize", "solver"), "solver 'gptq'"
    if solver == "rtn" and scales == "hessian":
        yield ("quantize", "solver", "scales"), "scales 'hessian'"
    for path, name in _transforms(data):
        yield path, f"transform {name!r}"
    if isinstance(value_at(data, ("quantize", "allocate")), Mapping):
        yield ("quantize", "allocate"), "allocate"
    kv_cache = value_at(data, ("quantize", "kv_cache"))
    if kv_cache in KV_MODES_FROM_DATA:
        yield ("quantize", "kv_cache"), f"kv_cache {kv_cache!r}"


def _transforms(data: Mapping[str, Any]) -> list[tuple[KeyPath, str]]:
    """The transforms that are named, each with its position; unknown ones are left to the schema."""
    named = value_at(data, ("quantize", "transforms"))
    items = enumerate(named) if isinstance(named, list) else ()
    return [
        (("quantize", "transforms", index), item["name"])
        for index, item in items
        if isinstance(item, Mapping) and item.get("name") in TRANSFORMS
    ]


def _scheme_names(data: Mapping[str, Any]) -> list[str]:
    """Every scheme that some linear may end in."""
    overrides = value_at(data, ("quantize", "overrides"))
    sections = [value_at(data, ("quantize",)), value_at(data, ("quantize", "allocate"))]
    sections += overrides if isinstance(overrides, list) else []
    names = [value_at(section, ("scheme", "name")) for section in sections]
    return [name for name in names if isinstance(name, str)]


def _transform_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    schemes = _scheme_names(data)
    placed = _transforms(data)
    is_alone = len({name for _, name in placed}) == 1
    seen: set[str] = set()
    for path, name in placed:
        if name in seen:
            yield Problem(path, f"found {name!r} twice; list each transform once")
        seen.add(name)
        if name == "smoothquant" and schemes and not any(scheme in ACTIVATION_SCHEMES for scheme in schemes):
            text = (
                f"transform {name!r} makes activations easier to round, and scheme {schemes[0]!r} does not round them; "
                f"use scheme {' or '.join(ACTIVATION_SCHEMES)}, or remove the transform"
            )
            yield Problem(path, text)
        if name == "awq" and is_alone and schemes and all(scheme in ACTIVATION_SCHEMES for scheme in schemes):
            text = (
                f"transform 'awq' chooses scales for weights that are rounded alone, and scheme {schemes[0]!r} rounds "
                "activations too; use transform smoothquant"
            )
            yield Problem(path, text)
        if name == "k_smooth" and value_at(data, ("quantize", "kv_cache")) in (None, "auto"):
            text = (
                "transform 'k_smooth' helps a quantized KV cache, and kv_cache is auto; set it, or remove the transform"
            )
            yield Problem(path, text, needs=("quantize", "kv_cache"))


def _stack_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Transforms and solvers that undo each other."""
    placed = _transforms(data)
    names = [name for _, name in placed]
    for index, (path, name) in enumerate(placed):
        if name != "rotate":
            continue
        if "awq" in names:
            text = (
                "'rotate' and 'awq' cannot be stacked: awq protects the few channels that matter most, and after a "
                "rotation all matter alike; remove one"
            )
            yield Problem(path, text)
        elif index > 0:
            yield Problem(path, "'rotate' changes what every layer reads, so it comes first; move it to the front")
        if value_at(data, ("quantize", "solver", "name")) == "rtn" and any(
            SCHEME_BITS.get(scheme, 8) < 8 for scheme in _scheme_names(data)
        ):
            text = (
                "after a rotation, rounding to nearest in few bits loses more than the rotation gains; use solver "
                "gptq, or remove 'rotate'"
            )
            yield Problem(path, text)
    if "awq" in names and "smoothquant" in names:
        path = placed[names.index("awq")][0]
        yield Problem(path, "'awq' and 'smoothquant' choose the same scales, each for its own aim; remove one")


def _solver_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    solver = value_at(data, ("quantize", "solver"))
    if not isinstance(solver, Mapping) or solver.get("name") != "gptq":
        return
    if "correction_frac" in solver and solver.get("propagate") != "both":
        text = "only used with propagate: both; add that, or remove it"
        path = ("quantize", "solver")
        yield Problem((*path, "correction_frac"), text, at_key=True, needs=(*path, "propagate"))
    if solver.get("signed_scales") is True and value_at(data, ("quantize", "scheme", "symmetric")) is False:
        text = "an asymmetric scheme has zero points and gains nothing from negative scales; remove it"
        yield Problem(("quantize", "solver", "signed_scales"), text, at_key=True)


def _allocate_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    section = value_at(data, ("quantize", "allocate"))
    if not isinstance(section, Mapping):
        return
    path = ("quantize", "allocate")
    budgets = [key for key in ("average_bits", "max_bytes") if section.get(key) is not None]
    if len(budgets) != 1:
        found = "both average_bits and max_bytes" if budgets else "no budget"
        yield Problem(path, f"found {found}; give one of average_bits and max_bytes", at_key=True, needs=path)
    low, high = (value_at(part, ("scheme", "name")) for part in (data["quantize"], section))
    if low in SCHEME_BITS and high in SCHEME_BITS and SCHEME_BITS[high] <= SCHEME_BITS[low]:
        text = f"scheme {high!r} has no more bits than quantize.scheme {low!r}; give one that has"
        yield Problem((*path, "scheme"), text)
