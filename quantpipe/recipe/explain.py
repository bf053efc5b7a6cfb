"""What pydantic found wrong, in the words of a recipe's author: what was found, what is allowed, the nearest name."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from quantpipe.errors import nearest, suggest
from quantpipe.recipe.document import KeyPath, Problem, describe
from quantpipe.recipe.section import Section

_TYPES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a name, or a mapping with one",
    "path_type": "a path (text)",
    "is_instance_of": "a path (text)",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "more than {}"),
    "greater_than_equal": ("ge", "{} or more"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "{} or less"),
}
_PATTERNS = {
    "^[0-9a-f]{64}$": "64 lower-case hexadecimal digits",
    "^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-', starting with a letter or digit",
}


def explain(error: ErrorDetails, root: type[BaseModel]) -> Problem:
    """The problem behind one error of validating ``root``."""
    path, owner, field = _walk(tuple(part for part in error["loc"] if part != "[key]"), root)  # pydantic's own mark
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(owner.model_fields) if owner is not None else []
        elsewhere = owner.set_elsewhere if owner is not None and issubclass(owner, Section) else {}
        if (key := str(path[-1])) in elsewhere:
            return Problem(path, f"unknown key {key!r}: {elsewhere[key]}", at_key=True, shown=path[:-1])
        text = f"unknown key {key!r}{suggest(key, known)}"
        near = nearest(str(path[-1]), known)
        meant = None if near is None else (*path[:-1], near)
        return Problem(path, text, at_key=True, shown=path[:-1], meant=meant)
    if kind == "missing":
        return Problem(path, f"missing; it is required: {_meaning(field)}", at_key=True, needs=path)
    if kind == "union_tag_invalid":
        known = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        return Problem(path, f"unknown {_noun(path)} {context['tag']!r}{suggest(context['tag'], known)}")
    if kind == "union_tag_not_found":
        return Problem(path, f"missing key 'name' (known: {', '.join(sorted(_tags(field)))})")
    if kind == "literal_error" and isinstance(found, str) and found not in _choices(context):
        return Problem(path, f"unknown {_noun(path)} {found!r}{suggest(found, _choices(context))}")
    if kind == "value_error":
        return Problem(path, str(context["error"]))
    shown = f"{found:g}" if kind in _BOUNDS else describe(found)
    # an entry that is wrong itself is not counted
    needs = path if kind == "too_short" else None
    return Problem(path, f"found {shown}; allowed: {_allowed(kind, context, error['msg'])}", needs=needs)


def _allowed(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound = context[key]
        return words.format(int(bound) if float(bound).is_integer() else bound)
    if kind == "literal_error":
        return " or ".join(_choices(context))
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")
    if kind in ("too_short", "string_too_short"):
        return f"at least {context['min_length']} {'character' if kind.startswith('string') else 'entry'}"
    return message[:1].lower() + message[1:]


def _choices(context: Mapping[str, Any]) -> list[str]:
    return [choice.strip(" '") for choice in context["expected"].replace(" or ", ", ").split(",")]


def _meaning(field: FieldInfo | None) -> str:
    description = (field.description if field is not None else None) or ""
    return description.split(". ")[0].removesuffix(".").replace("\n", " ")


def _noun(path: KeyPath) -> str:
    """What the value at ``path`` is called: its key, or one of what a list holds."""
    if isinstance(path[-1], int):
        return str(path[-2]).removesuffix("s")
    return path[-1]


def _tags(field: FieldInfo | None) -> list[str]:
    annotation = field.annotation if field is not None else None
    models = _models(_item(annotation) or annotation)
    return [tag for model in models for tag in get_args(model.model_fields["name"].annotation)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value with this type hint may be of."""
    if get_origin(annotation) is Annotated:
        return _models(get_args(annotation)[0])
    candidates = (annotation, *get_args(annotation))
    return [candidate for candidate in candidates if isinstance(candidate, type) and issubclass(candidate, BaseModel)]


def _item(annotation: Any) -> Any:
    """The type hint of what a list or mapping of this type hint holds; None for anything else."""
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def _tagged(annotation: Any, tag: int | str) -> Any:
    """The type hint with this tag, of those that a value may have; None where it may have none such."""
    for form in get_args(annotation):
        if get_origin(form) is Annotated and Tag(str(tag)) in get_args(form)[1:]:
            return get_args(form)[0]
    return None


def _walk(
    location: tuple[int | str, ...], root: type[BaseModel]
) -> tuple[KeyPath, type[BaseModel] | None, FieldInfo | None]:
    """A pydantic location as a key path (without union tags), the model it lies in, and the field it ends at."""
    path: list[int | str] = []
    owner: type[BaseModel] | None = root
    field: FieldInfo | None = None
    annotation: Any = root
    for part in location:
        if (form := _tagged(annotation, part)) is not None:
            annotation = form
            continue
        models = _models(annotation)
        if len(models) > 1:  # a union's tag: what follows is looked up in the model that it names
            annotation = owner = next(m for m in models if part in get_args(m.model_fields["name"].annotation))
            field = None
            continue
        path.append(part)
        if isinstance(part, int) or get_origin(annotation) is dict:
            annotation, owner, field = _item(annotation), None, None
            continue
        owner = models[0] if models else None
        field = owner.model_fields.get(part) if owner is not None else None
        annotation = field.annotation if field is not None else None
    return tuple(path), owner, field
