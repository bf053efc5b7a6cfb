"""Certificates: taken, refused in one line, and served with."""

import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quantpipe.errors import DataError
from quantpipe.serve.front_options import FrontOptions

StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


def made(folder: Path, *options: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: it makes the certificate")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
    command = ("openssl", "req", *kind, *names, *options, "-keyout", str(key), "-out", str(certificate))
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_server_with_a_certificate_speaks_https_and_nothing_else(
    tmp_path: Path, start_server: StartServer, make_engine: MakeEngine
) -> None:
    certificate, key = made(tmp_path, "-nodes")
    options = FrontOptions(ssl_certfile=certificate, ssl_keyfile=key)
    options.check_ssl()
    assert (options.url_scheme, FrontOptions().url_scheme) == ("https", "http")
    server = start_server(make_engine(), options=options)
    url = server.url.replace("http://", "https://")
    context = ssl.create_default_context(cafile=certificate)
    body = {"model": "echo", "prompt": "abc", "stream": True}
    assert httpx.post(f"{url}/v1/completions", json=body, verify=context).text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health")


def test_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    certificate, key = made(tmp_path, "-passout", "pass:secret")
    with pytest.raises(DataError, match="cannot be used") as caught:
        FrontOptions(ssl_certfile=certificate, ssl_keyfile=key).check_ssl()  # and nobody is asked for the password
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="cannot be used"):
        FrontOptions(ssl_certfile=certificate).check_ssl()
    (tmp_path / "other").mkdir()
    _, other_key = made(tmp_path / "other", "-nodes")
    with pytest.raises(DataError, match="cannot be used"):
        FrontOptions(ssl_certfile=certificate, ssl_keyfile=other_key).check_ssl()
    with pytest.raises(DataError, match="no such file"):
        FrontOptions(ssl_certfile=tmp_path / "none.pem").check_ssl()
    with pytest.raises(DataError, match="give both"):
        FrontOptions(ssl_keyfile=key).check_ssl()
    FrontOptions().check_ssl()
