"""What no application's settings say alone: that none has another's sessions or port, or Ray Serve's port."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

from serving.settings.config import check_file, main
from serving.settings.strict_settings import SettingsError

TWO_APPLICATIONS = """applications:
- args: {model: {path: assets/models/kedge-chat}, controller: {name: a, state_dir: x}, ingress: {operator_port: 81}}
- args: {model: {path: assets/models/kedge-chat}, controller: {name: b, state_dir: y}, ingress: {operator_port: 82}}
"""


@pytest.mark.parametrize(
    ("http_options", "port"),
    [("", 8000), ("http_options: {host: 0.0.0.0}\n", 8000), ("http_options: {port: 8888}\n", 8888)],
)
def test_operators_have_another_port_than_everybody(http_options: str, port: int, tmp_path: Path) -> None:
    """Both could listen there, and each connection went to one of the two by chance."""
    path = tmp_path / "cluster.yaml"
    path.write_text(http_options + TWO_APPLICATIONS)
    assert len(check_file(str(path))) == 2
    path.write_text(http_options + TWO_APPLICATIONS.replace("operator_port: 82", f"operator_port: {port}"))
    with pytest.raises(SettingsError, match=rf"args\.ingress\.operator_port: {port} is http_options\.port"):
        check_file(str(path))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http_options: {prot: 80}", "http_options: unknown key 'prot'; did you mean 'port'?"),
        ("http_options: {hostname: x}", "http_options: unknown key 'hostname'; did you mean 'host'?"),
        ("http-options: {host: x}", "unknown key 'http-options'; did you mean 'http_options'?"),
        (
            "http_options: {port: 80000}",
            "http_options.port: a number from 0 to 65535 was expected, not 80000",
        ),
        ("http_options: {port: -1}", "http_options.port: a number from 0 to 65535 was expected, not -1"),
        ("http_options: {port: '80'}", "http_options.port: a number from 0 to 65535 was expected, not '80'"),
        ("http_options: {port: yes}", "http_options.port: a number from 0 to 65535 was expected, not True"),
        ("http_options: {host: [a]}", "http_options.host: an address was expected, not ['a']"),
        ("http_options: [80]", "http_options: a mapping was expected, not [80]"),
    ],
)
def test_where_it_listens_is_not_guessed_at(text: str, told: str, tmp_path: Path) -> None:
    """With another word for `host` it listened on every interface. A port that is none was told by a traceback."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{text}\n{TWO_APPLICATIONS}")
    with pytest.raises(SettingsError) as caught:
        check_file(str(path))
    assert str(caught.value) == told


def test_a_prefix_that_is_no_path_is_refused(tmp_path: Path) -> None:
    """Ray Serve took it, and the ready line named http://127.0.0.1:8000api."""
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO_APPLICATIONS.replace("- args", "- route_prefix: api\n  args"))
    with pytest.raises(
        SettingsError, match="route_prefix: a path that begins with / was expected, not 'api'"
    ):
        check_file(str(path))


def test_no_key_of_ray_serves_is_taken_for_a_slip(tmp_path: Path) -> None:
    unset = {"applications", "http_options"}
    values: dict[str, object] = dict.fromkeys(set(ServeDeploySchema.model_fields) - unset)
    values["http_options"] = dict.fromkeys(HTTPOptionsSchema.model_fields) | {"port": 8888}
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{yaml.safe_dump(values)}{TWO_APPLICATIONS}")
    assert len(check_file(str(path))) == 2


def test_a_log_in_redis_belongs_to_the_controllers_name(tmp_path: Path) -> None:
    """Two applications with a log in Redis need no state_dir of their own, but each needs a name."""
    path = tmp_path / "cluster.yaml"
    in_redis = re.sub("state_dir: .", "redis_url: redis://localhost:6379/1", TWO_APPLICATIONS)
    path.write_text(in_redis)
    logs = [args.controller.log_settings() for args in check_file(str(path))]
    assert list(map(str, logs)) == [f"{name} in Redis at redis://localhost:6379/1" for name in "ab"]
    path.write_text(in_redis.replace("name: b", "name: a"))
    with pytest.raises(SettingsError, match=r"args\.controller\.name 'a'"):
        check_file(str(path))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            ("name: b, ", "name: a, "),
            "two applications have the args.controller.name 'a'; each needs its own",
        ),
        ((", state_dir: y", ", state_dir: x"), "two applications have the args.controller.state_dir '"),
        (
            (", state_dir: y", ", state_dir: ./y/../x"),
            "two applications have the args.controller.state_dir '",
        ),
        ((": 82", ": 81"), "two applications have the args.ingress.operator_port 81"),
    ],
)
def test_two_applications_cannot_have_one_controller_or_port(
    changed: tuple[str, str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sessions of one application would be placed on the other's replicas, or it could not listen."""
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO_APPLICATIONS)
    assert len(check_file(str(path))) == 2
    path.write_text(TWO_APPLICATIONS.replace(*changed))
    assert main([str(path)]) == 2
    assert reason in capsys.readouterr().err
