"""Small blocking calls on a server, with errors that fit on one line."""

from __future__ import annotations

from typing import Any

import httpx

from serving.cli.client.stream import error_message

SESSION_HEADER = "x-session-id"
MODE_HEADER = "x-session-mode"
TENANT_HEADER = "x-tenant-id"


class ServerError(Exception):
    """The server cannot be reached (`status` is None) or answered with an error. The message is for the user."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def authorization(api_key: str | None) -> dict[str, str]:
    """The header with the key; empty if there is no key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def server_at(
    url: str, api_key: str | None = None, *, timeout: httpx.Timeout | float, tenant: str | None = None
) -> httpx.Client:
    """A client for one server; `timeout` in seconds. `tenant`: whose sessions are meant if the key has no tenant."""
    headers = authorization(api_key) | ({} if tenant is None else {TENANT_HEADER: tenant})
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout)
    except (
        httpx.InvalidURL,
        ValueError,
        ImportError,
    ) as error:  # the last two: a proxy that httpx cannot use
        raise ServerError(f"{url} cannot be called: {error}") from error


def unreachable(url: str, error: Exception) -> ServerError:
    """An error that says that `url` does not answer, and why."""
    reason = str(error) or type(error).__name__
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
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(str(client.base_url), error) from error
    if response.is_error:
        raise refused(response)
    try:
        return response.json() if response.content else None
    except ValueError as error:
        raise ServerError(f"{path} did not answer with JSON") from error


def first_model(client: httpx.Client) -> str:
    """The id of the first model that the server lists."""
    models = request_json(client, "GET", "/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError("/v1/models lists no model; name one with --model") from error
