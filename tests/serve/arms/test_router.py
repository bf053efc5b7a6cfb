"""Which arm a request goes to: what it asks for, its user, or a draw."""

from collections import Counter

import pytest

from quantpipe.errors import RequestError
from quantpipe.serve.api_errors import ModelNotFoundError
from quantpipe.serve.arms.router import Route, Router
from quantpipe.serve.arms.split import Split

LABELS, NAMES = ("a", "b"), ("legal", "base")


@pytest.fixture
def router() -> Router:
    return Router(LABELS, NAMES, "chat", Split((50, 50)))


def test_header_goes_before_model_and_model_before_user(router: Router) -> None:
    for header in ("b", "base"):
        assert router.route("chat", header, "someone") == Route((1,), "header")
    assert router.route("base", None, "someone") == Route((1,), "model")
    assert router.route("base", "b", "someone") == Route((1,), "header")
    by_user = router.route("chat", None, "someone")
    assert by_user.by == "user" and sorted(by_user.arms) == [0, 1]
    assert {router.route("chat", None, "someone") for _ in range(20)} == {by_user}


def test_nobodys_requests_are_drawn_and_the_other_arm_is_second(router: Router) -> None:
    routes = Counter(router.route("chat", None, user) for user in [None, ""] * 50)
    assert routes.keys() == {Route((0, 1), "draw"), Route((1, 0), "draw")}
    assert min(routes.values()) > 20


def test_what_is_not_there_is_named_beside_what_is(router: Router) -> None:
    with pytest.raises(RequestError, match=r"X-Quantpipe-Arm: there is no arm 'c'; known: 'a' \(legal\), 'b' \(base\)"):
        router.route("chat", "c", None)
    with pytest.raises(ModelNotFoundError, match=r"'gpt-9' is not served here; .*'chat' and 'legal' and 'base'"):
        router.route("gpt-9", None, None)
    with pytest.raises(RequestError, match="'a' is not the arm of model 'base'"):
        router.route("base", "a", None)


def test_the_name_for_all_means_all_even_where_it_is_the_first_arms() -> None:
    router = Router(LABELS, NAMES, "legal", Split((0, 1)))
    assert router.models == ("legal", "base")
    assert router.route("legal", None, None).arms == (1, 0)
    assert router.route("legal", "legal", None).arms == (0,)


def test_a_shadow_is_not_spoken_of() -> None:
    router = Router(LABELS, NAMES, "chat", Split((1, 0)), num_answering=1)
    assert router.models == ("chat",)
    assert router.route("chat", None, "someone").arms == (0,)
    with pytest.raises(RequestError, match="no arm 'b'"):
        router.route("chat", "b", None)
    with pytest.raises(ModelNotFoundError):
        router.route("base", None, None)


def test_one_arm_takes_all_and_still_refuses_another_header() -> None:
    router = Router(("a",), ("legal",), "chat", Split((1,)))
    assert router.models == ("chat",)
    assert router.route("chat", "a", None) == Route((0,), "header")
    assert router.route("chat", None, "someone").arms == (0,)
    with pytest.raises(RequestError, match="no arm 'b'"):
        router.route("chat", "b", None)
