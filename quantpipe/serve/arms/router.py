"""Which arm answers a request: the one it asks for, or its user's, or one that is drawn. Knows names, no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantpipe.errors import RequestError
from quantpipe.serve.api_errors import ModelNotFoundError
from quantpipe.serve.arms.split import Draws, Split
from quantpipe.serve.fields import shown_name

ARM_HEADER = "X-Quantpipe-Arm"

ChosenBy = Literal["header", "model", "user", "draw", "failover"]


@dataclass(frozen=True)
class Route:
    """Arms by number, in the order in which they are to be tried, and why the first is the first."""

    arms: tuple[int, ...]
    by: ChosenBy


class Router:
    """Chooses among arms called ``labels``, whose models are ``names``; ``model`` is the one name for all of them.

    The first ``num_answering`` arms answer; the others are not spoken of.
    """

    def __init__(
        self, labels: Sequence[str], names: Sequence[str], model: str, split: Split, num_answering: int | None = None
    ) -> None:
        self.labels = tuple(labels[:num_answering])
        self.names = tuple(names[:num_answering])
        self.model = model
        self._split = split
        self._draws = Draws(split)

    @property
    def models(self) -> tuple[str, ...]:
        """What clients may ask for: the one name first, then those of the arms."""
        return tuple(dict.fromkeys((self.model, *(self.names if len(self.names) > 1 else ()))))

    def route(self, model: str, header: str | None, user: str | None) -> Route:
        """Raises ModelNotFoundError for another model, RequestError for an arm that is not there."""
        fixed = self.fixed(model, header)
        if fixed is not None:
            return fixed
        if len(self.labels) == 1:
            return Route((0,), "draw")
        first = self._split.arm_of_user(user) if user else self._draws.next()
        others = (arm for arm in range(len(self.labels)) if arm != first)
        return Route((first, *others), "user" if user else "draw")

    def fixed(self, model: str | None, header: str | None) -> Route | None:
        """The route of a request that asks for one arm, by the header or by its model's own name. Raises likewise."""
        by_model = None if model is None else self._of_model(model)
        if header is None:
            return None if by_model is None else Route((by_model,), "model")
        arm = self._of_header(header)
        if by_model is not None and by_model != arm:
            raise RequestError(
                f"{ARM_HEADER}: '{shown_name(header)}' is not the arm of model '{self.names[by_model]}'; leave one out",
                "model",
            )
        return Route((arm,), "header")

    def _of_model(self, model: str) -> int | None:
        """The arm of a model's own name; None for the name that all share."""
        if model == self.model:
            return None
        if model not in self.models:
            known = " and ".join(f"'{name}'" for name in self.models)
            raise ModelNotFoundError(f"model '{shown_name(model)}' is not served here; this server serves {known}")
        return self.names.index(model)

    def _of_header(self, header: str) -> int:
        for known in (self.labels, self.names):
            if header in known:
                return known.index(header)
        arms = ", ".join(f"'{label}' ({name})" for label, name in zip(self.labels, self.names, strict=True))
        raise RequestError(f"{ARM_HEADER}: there is no arm '{shown_name(header)}'; known: {arms}")
