"""What the operator's settings say of requests and replies. One ApiRules holds for all of an application's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from serving.front.api.body_limits import BodyLimits

KEEP_ALIVE_S = 5.0


@dataclass(frozen=True, slots=True)
class AffinityRules:
    """Which names count beside `prompt_cache_key`: the user that a request names, and the cookie of this name."""

    user: bool = False
    cookie: str | None = None


NO_AFFINITY_RULES = AffinityRules()


@dataclass(frozen=True, slots=True)
class ApiRules:
    """`ignore_unknown_fields`: a body may have unknown fields. `request_chat_template`: it may bring its own chat
    template. `request_priority`: it may set a priority. `incremental_streaming_output`: streams of SGLang's protocol
    have only new text in each event. `affinity_rules`: which requests should be at one replica. `body_limits` are those
    of the model that is served now. A stream is silent for at most `keep_alive_s`."""

    ignore_unknown_fields: bool = False
    request_chat_template: bool = False
    request_priority: bool = False
    incremental_streaming_output: bool = False
    affinity_rules: AffinityRules = NO_AFFINITY_RULES
    body_limits: Callable[[], BodyLimits] = BodyLimits
    keep_alive_s: float = KEEP_ALIVE_S


def rules_of(app: FastAPI) -> ApiRules:
    rules: ApiRules = app.state.rules
    return rules
