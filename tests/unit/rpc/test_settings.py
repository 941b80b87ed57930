"""The settings of a service process."""

import pytest

from relaxd.rpc.credentials import read_token
from relaxd.rpc.service_settings import parse_settings
from services.coordinator.api.validation import REPLICA_ID


def test_defaults():
    settings = parse_settings("reward", [], {})
    assert (settings.host, settings.port, settings.coordinator) == ("127.0.0.1", 0, "127.0.0.1:50050")
    assert settings.redis == "redis://127.0.0.1:6379/0"
    assert settings.replica_id.startswith("reward-")
    assert settings.replica_id != parse_settings("reward", [], {}).replica_id
    assert settings.token is None
    assert parse_settings("coordinator", [], {}).port == 50050


def test_the_environment_sets_and_flags_win():
    environment = {
        "RELAXD_PORT": "50051",
        "RELAXD_GRACE_SECONDS": "5",
        "RELAXD_REPLICA_ID": "r1",
        "RELAXD_LOG_LEVEL": "DEBUG",
        "RELAXD_HOST": "",
    }
    settings = parse_settings("reward", ["--port", "50052"], environment)
    assert (settings.port, settings.grace_seconds, settings.replica_id) == (50052, 5.0, "r1")
    assert (settings.log_level, settings.host) == ("debug", "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--port", "70000"], {}, "argument --port: invalid port (0 to 65535) value: '70000'"),
        ([], {"RELAXD_PORT": "x"}, "environment variable RELAXD_PORT: invalid port (0 to 65535) value: 'x'"),
        (["--coordinator", "50050"], {}, "argument --coordinator: invalid address (host:port) value: '50050'"),
        (
            ["--redis", "localhost"],
            {},
            "argument --redis: nothing:// is no scheme of a Redis: it must be redis://host:port",
        ),
        (["--grace-seconds", "inf"], {}, "invalid number of seconds (0 or more) value: 'inf'"),
        ([], {"RELAXD_LOG_LEVEL": "loud"}, "invalid log level (debug, info, warning, error) value: 'loud'"),
        ([], {"RELAXD_TOKEN": "a\tb"}, "the token in RELAXD_TOKEN is empty or not printable ASCII"),
        (["--token-file", "/no/such/file"], {}, "No such file or directory: '/no/such/file'"),
    ],
)
def test_what_is_wrong_is_named(capsys, arguments, environment, message):
    with pytest.raises(SystemExit) as caught:
        parse_settings("reward", arguments, environment)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_token_comes_from_a_file_or_the_environment(tmp_path):
    (tmp_path / "token").write_text("from-file\n")
    file = str(tmp_path / "token")
    assert parse_settings("reward", ["--token-file", file], {"RELAXD_TOKEN": "other"}).token == "from-file"
    assert parse_settings("reward", [], {"RELAXD_TOKEN_FILE": file}).token == "from-file"
    assert read_token(environment={"RELAXD_TOKEN": "direct", "RELAXD_TOKEN_FILE": file}) == "direct"
    assert "direct" not in repr(parse_settings("reward", [], {"RELAXD_TOKEN": "direct"}))


def test_help_names_every_variable(capsys):
    with pytest.raises(SystemExit):
        parse_settings("reward", ["--help"], {})
    shown = capsys.readouterr().out
    for name in ("HOST", "PORT", "ADVERTISE", "COORDINATOR", "REDIS", "REPLICA_ID", "GRACE_SECONDS", "TOKEN_FILE"):
        assert f"RELAXD_{name}" in shown


def test_a_redis_password_comes_from_a_file(tmp_path):
    file = tmp_path / "password"
    file.write_text("p@ss/word\n")
    environment = {"RELAXD_REDIS": "redis://redis:6379/0", "RELAXD_REDIS_PASSWORD_FILE": str(file)}
    assert parse_settings("reward", [], environment).redis == "redis://:p%40ss%2Fword@redis:6379/0"
    environment["RELAXD_REDIS"] = "redis://relaxd@redis:6379/0"
    assert parse_settings("reward", [], environment).redis == "redis://relaxd:p%40ss%2Fword@redis:6379/0"


@pytest.mark.parametrize(
    ("url", "password", "message"),
    [
        ("redis://redis:6379/0", "", "the Redis password in"),
        ("redis://:other@redis:6379/0", "secret", "without a password"),
    ],
)
def test_a_redis_password_file_must_fit(tmp_path, capsys, url, password, message):
    file = tmp_path / "password"
    file.write_text(password)
    with pytest.raises(SystemExit):
        parse_settings("reward", ["--redis-password-file", str(file)], {"RELAXD_REDIS": url})
    output = capsys.readouterr().err
    assert message in output
    assert "secret" not in output


def test_a_password_is_no_argument(capsys):
    with pytest.raises(SystemExit):
        parse_settings("reward", ["--redis", "redis://:secret@redis:6379/0"], {})
    output = capsys.readouterr().err
    assert "argument --redis: has a password" in output
    assert "secret" not in output
    from_environment = parse_settings("reward", [], {"RELAXD_REDIS": "redis://:secret@redis:6379/0"})
    assert from_environment.redis == "redis://:secret@redis:6379/0"
    assert "secret" not in repr(from_environment)
    with pytest.raises(SystemExit):
        parse_settings("reward", [], {"RELAXD_REDIS": "reds://me:secret@redis:6379/0"})
    output = capsys.readouterr().err
    assert "reds:// is no scheme of a Redis" in output
    assert "secret" not in output


@pytest.mark.parametrize(
    ("role", "token", "told"),
    [
        ("reward", "", "for the role reward, or for admin: there is none"),
        ("reward", "other", "for the role reward, or for admin: it isn't there"),
        ("reward", "looks", 'for the role reward, or for admin: "looker" is for read'),
        ("trainer", "scores", 'for the role trainer, or for admin: "scorer" is for reward'),
        ("coordinator", "scores", 'for the role coordinator, or for admin: "scorer" is for reward'),
        ("reward", "scores", ""),
        ("reward", "anything", ""),
        ("trainer", "anything", ""),
        ("launcher", "", ""),  # it calls nobody
    ],
)
def test_a_tokens_file_must_have_the_services_own_token(tmp_path, capsys, role, token, told):
    file = tmp_path / "tokens"
    file.write_text("reward scorer scores\nread looker looks\nadmin ann anything\n")
    environment = {"RELAXD_TOKENS_FILE": str(file), "RELAXD_TOKEN": token}
    if not told:
        settings = parse_settings(role, [], environment)
        assert settings.security.tokens is settings.tokens
        return
    with pytest.raises(SystemExit):
        parse_settings(role, [], environment)
    output = " ".join(capsys.readouterr().err.split())
    assert told in output
    assert "scores" not in output


def test_without_a_tokens_file_callers_need_the_services_own():
    assert parse_settings("reward", [], {"RELAXD_TOKEN": "only"}).security.tokens
    assert parse_settings("reward", [], {}).security.tokens is None


def test_a_replica_id_names_the_host_and_is_never_given_twice():
    ids = {parse_settings("rollout", [], {}).replica_id for _ in range(100)}
    assert len(ids) == 100
    assert all(REPLICA_ID.fullmatch(replica_id) for replica_id in ids)


def test_a_console_is_told_where_traces_are(capsys):
    jaeger = "http://jaeger:16686/trace/{trace_id}"
    assert parse_settings("console", [], {"RELAXD_TRACE_URL": jaeger}).trace_url == jaeger
    for wrong in ("http://jaeger:16686", "jaeger/{trace_id}", "javascript:{trace_id}"):
        with pytest.raises(SystemExit):
            parse_settings("console", ["--trace-url", wrong], {})
        said = " ".join(capsys.readouterr().err.split())
        assert "--trace-url: invalid URL with {trace_id} (such as http" in said
        assert f"value: {wrong!r}" in said


def test_a_rollout_replica_is_told_its_sglang_server(tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("from-file\n")
    environment = {"RELAXD_SGLANG_URL": "http://gpu-1:30000/", "RELAXD_SGLANG_KEY": "secret"}
    settings = parse_settings("rollout", [], environment)
    assert (settings.sglang_url, settings.sglang_key) == ("http://gpu-1:30000", "secret")
    assert "secret" not in repr(settings)
    assert parse_settings("rollout", ["--sglang-key-file", str(key)], environment).sglang_key == "from-file"
    assert parse_settings("rollout", [], {}).sglang_key is None
    with pytest.raises(SystemExit):
        parse_settings("rollout", ["--sglang-url", "gpu-1:30000"], {})
    assert "URL (http://host:port)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_settings("trainer", ["--sglang-url", "http://gpu-1:30000"], {})
