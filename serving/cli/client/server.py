"""Small blocking calls on a server, with errors that fit on one line."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import httpx

from serving.cli.client.stream import error_message

SESSION_HEADER = "x-session-id"
MODE_HEADER = "x-session-mode"
TENANT_HEADER = "x-tenant-id"
MAX_NAME_CHARS = 256


class ServerError(Exception):
    """The server cannot be reached (`status` is None) or answered with an error. The message is for the user."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def checked_name(name: str, given_as: str) -> str:
    """The name, if a server takes such names. Otherwise raises ServerError, which says how the name was given, and
    nothing of the name: it may be a key in the wrong place."""
    if not 0 < len(name) <= MAX_NAME_CHARS or " " in name or not _fits_a_header(name):
        raise ServerError(f"{given_as}: use 1 to {MAX_NAME_CHARS} visible ASCII characters, no spaces")
    return name


def authorization(api_key: str | None) -> dict[str, str]:
    """The header with the key; empty if there is no key. White space around the key, such as the end of a file's line,
    is no part of it. Raises ServerError, which says nothing of the key, if a header cannot have it."""
    key = (api_key or "").strip()
    if not _fits_a_header(key):
        raise ServerError("--api-key or KEDGE_API_KEY: use visible ASCII characters")
    return {"authorization": f"Bearer {key}"} if key else {}


def server_at(
    url: str, api_key: str | None = None, *, timeout: httpx.Timeout | float, tenant: str | None = None
) -> httpx.Client:
    """A client for one server; `timeout` in seconds. `tenant`: whose sessions are meant if the key has no tenant.
    Raises ServerError for a key, a tenant or a `url` that cannot be one."""
    check_url(url)
    headers = authorization(api_key)
    if tenant is not None:
        headers[TENANT_HEADER] = checked_name(tenant, "--tenant or KEDGE_TENANT")
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout)
    except (
        httpx.InvalidURL,
        ValueError,
        ImportError,
    ) as error:  # the last two: a proxy that httpx cannot use
        raise ServerError(f"{url} cannot be called: {error}") from error


def check_url(url: str) -> None:
    """Raises ServerError for the two slips that would look like a server that is down, or is not Kedge."""
    if not url.lower().startswith(("http://", "https://")):
        raise ServerError(f"--url or KEDGE_URL: {url!r} does not begin with http:// or https://")
    if url.rstrip("/").endswith("/v1"):
        raise ServerError(f"--url or KEDGE_URL: leave out the /v1 of {url!r}")


def _fits_a_header(text: str) -> bool:
    return text.isascii() and text.isprintable()


def not_text(error: UnicodeError) -> ServerError:
    """An error about text that UTF-8 cannot write, and that was therefore not sent."""
    return ServerError(f"nothing was sent, because it is not all text: {error}")


def not_kedge(client: httpx.Client) -> ServerError:
    """An error about a reply that Kedge would not give."""
    return ServerError(f"what answers at {client.base_url} is not Kedge")


def unreachable(url: str, error: Exception) -> ServerError:
    """An error that says that `url` does not answer, and why. A server that takes calls is not said to be absent."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ReadTimeout | httpx.ReadError | httpx.RemoteProtocolError):
        return ServerError(f"the server at {url} gave no answer ({reason}): it hangs, is very busy, or ends")
    return ServerError(f"no server at {url} ({reason}). Is it running? Start one with `make serve`.")


def refused(response: httpx.Response) -> ServerError:
    """An error with the message of an error reply, which must have been read."""
    try:
        message = error_message(response.json())
    except ValueError:
        message = response.text.strip()[:200]
    return ServerError(f"{response.status_code}: {message or response.reason_phrase}", response.status_code)


def request_json(client: httpx.Client, method: str, path: str, body: object = None) -> Any:
    """The decoded reply. Raises ServerError if there is no reply, an error reply, or one that is not JSON."""
    try:
        response = client.request(method, path, json=body)
    except UnicodeError as error:
        raise not_text(error) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(str(client.base_url), error) from error
    if response.is_error:
        raise refused(response)
    try:
        return response.json() if response.content else None
    except ValueError as error:
        raise ServerError(f"{path} did not answer with JSON") from error


def ask_kedge(
    client: httpx.Client, method: str, path: str, body: object = None, *, fields: Collection[str]
) -> dict[str, Any]:
    """The decoded reply, an object that has the `fields`. Raises ServerError as `request_json` does, and for a reply
    without them, which another server has given."""
    found = request_json(client, method, path, body)
    if not isinstance(found, dict) or not found.keys() >= set(fields):
        raise not_kedge(client)
    return found


def first_model(client: httpx.Client) -> str:
    """The id of the first model that the server lists."""
    models = request_json(client, "GET", "/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError("/v1/models lists no model; name one with --model") from error
