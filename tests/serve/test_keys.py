"""The file of keys, who a secret belongs to, and what its mistakes are called."""

import hashlib
import re
from pathlib import Path

import pytest

from quantpipe.errors import DataError
from quantpipe.serve.admission.key_limits import KeyLimits
from quantpipe.serve.admission.limits import RefusedError
from quantpipe.serve.keys import ApiKey, KeyRing, add_key, digest_of, new_secret, read_keys

A, B, C = (hashlib.sha256(name).hexdigest() for name in (b"a", b"b", b"c"))


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_holds_a_key_on_each_line_with_limits_in_either_form(tmp_path: Path) -> None:
    text = f"alice: {A}\n# a comment\nbob: {B}, max_concurrent=4, tokens_per_minute = 1000\n"
    text += f"carol: {{sha256: {C}, requests_per_minute: 60}}\n"
    assert read_keys(written(tmp_path, text)) == (
        ApiKey("alice", A),
        ApiKey("bob", B, KeyLimits(max_concurrent=4, tokens_per_minute=1000)),
        ApiKey("carol", C, KeyLimits(requests_per_minute=60)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no keys"),
        ("- a\n", "holds no keys"),
        ("a: [", r"keys.yaml:\d: cannot be read as YAML"),
        (f"alice: {A}\nalice: {B}\n", "keys.yaml:2: 'alice' is there twice"),
        (f"alice: {A}\nbob: {A}\n", "keys.yaml:2: 'bob' has the digest of another key"),
        ("alice: a-secret-by-mistake\n", "keys.yaml:1: 'alice' has no SHA-256 digest"),
        (f"alice: {A.upper()}\n", "has no SHA-256 digest"),
        ("alice:\n", "has no SHA-256 digest"),
        (f"alice: [{A}]\n", "'alice' is a list"),
        (f"a b: {A}\n", "'a b' is no name"),
        (f'"a\\nb": {A}\n', r"'a\\nb' is no name"),
        (f"alice: {A}, max_concurent=4\n", "unknown limit 'max_concurent'; did you mean 'max_concurrent'"),
        (f"alice: {A}, max_concurrent=0\n", "max_concurrent is '0'; give a whole number of at least 1"),
        (f"alice: {A}, max_concurrent\n", "max_concurrent is ''"),
        (f"alice: {A}, max_concurrent=1, max_concurrent=2\n", "has a limit twice"),
        (f"alice: {{sha256: {A}, max_concurrent: 1, max_concurrent: 2}}\n", "has a limit twice"),
        (f"alice: {{sha256: {A}, max_concurrent: 1.5}}\n", "max_concurrent is '1.5'"),
    ],
)
def test_mistakes_in_the_file_are_one_line_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_keys(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert "a-secret-by-mistake" not in str(caught.value)


def test_file_that_is_missing_or_not_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_keys(tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not text in UTF-8"):
        read_keys(tmp_path / "binary")


def test_added_key_is_found_by_its_secret_and_the_file_does_not_hold_it(tmp_path: Path) -> None:
    path = written(tmp_path, f"alice: {A}")  # no line break at the end
    secret = add_key(path, "bob")
    assert add_key(path, "carol") != secret
    text = path.read_text()
    assert secret not in text and digest_of(secret) in text
    keys = read_keys(path)
    assert [key.name for key in keys] == ["alice", "bob", "carol"]
    assert KeyRing(keys).tenant(f"Bearer {secret}").name == "bob"
    with pytest.raises(DataError, match="'bob' is there already"):
        add_key(path, "bob")
    with pytest.raises(DataError, match="is no name"):
        add_key(path, "no name")
    assert path.read_text() == text
    dora = add_key(tmp_path / "new.yaml", "dora")
    assert [key.digest for key in read_keys(tmp_path / "new.yaml")] == [digest_of(dora)]


def test_secrets_are_long_random_and_plain() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch(r"qp-[A-Za-z0-9_-]{43}", secret) for secret in made)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "secret", "Bearer secre", "Bearer secrets", "Bearer \udcff"]
)
def test_header_that_is_nobodys_is_401_in_openais_words_and_quotes_nothing(header: str | None) -> None:
    ring = KeyRing([ApiKey("alice", digest_of("secret"))])
    with pytest.raises(RefusedError) as caught:
        ring.tenant(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "secre" not in str(caught.value)


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(
        "quantpipe.serve.keys.hmac.compare_digest", lambda one, other: compared.append(one) or one == other
    )
    ring = KeyRing([ApiKey(name, digest_of(name)) for name in ("a", "b", "c")])
    assert ring.tenant("bearer a").name == "a"
    assert len(compared) == 3


def test_salts_differ_by_secret_and_by_the_clients_own_and_hold_neither() -> None:
    ring = KeyRing([ApiKey(name, digest_of(f"secret of {name}")) for name in ("a", "b")])
    one, other = (ring.tenant(f"Bearer secret of {name}") for name in ("a", "b"))
    salts = {tenant.cache_salt(own) for tenant in (one, other) for own in ("", "x", "y")}
    assert len(salts) == 6
    assert one.cache_salt("x") == ring.tenant("Bearer secret of a").cache_salt("x")
    assert "secret" not in repr(one)
    assert one.cache_salt("") != digest_of("secret of a"), "the file must not tell it"
