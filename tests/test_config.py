"""`zcactor.config`: precedence, sources, and the error that answers each mistake."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import numpy as np
import pytest

from zcactor.config import FILE_NAME, MAXIMUM, MINIMUM, Config, Rdma, load_config, ports_of, rdma_of, security_of
from zcactor.sizes import LONGEST_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The user's configuration directory."""
    path = tmp_path / "user"
    path.mkdir()
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The working directory."""
    path = tmp_path / "here"
    path.mkdir()
    return path


def load(
    here: Path, user: Path, environ: Mapping[str, str] | None = None, **arguments: object
) -> tuple[Config, Mapping[str, str]]:
    """`load_config`, cut off from this machine's own files and environment."""
    return load_config(arguments, environ=environ or {}, directory=here, user_directory=user)


def test_defaults_have_their_source(here: Path, user: Path) -> None:
    config, sources = load(here, user)
    assert config == Config()
    assert set(sources) == {field.name for field in dataclasses.fields(Config)}
    assert set(sources.values()) == {"default"}


def test_each_source_beats_the_weaker_ones(here: Path, user: Path) -> None:
    keys = ["recv_depth", "max_pending_calls", "eager_limit", "spawn_timeout"]
    (user / FILE_NAME).write_text("".join(f"{key} = 101\n" for key in keys))
    (here / FILE_NAME).write_text("".join(f"{key} = 102\n" for key in keys[1:]))
    environ = {f"ZCACTOR_{key.upper()}": "103" for key in keys[2:]}
    config, sources = load(here, user, environ, spawn_timeout=104)
    assert [getattr(config, key) for key in keys] == [101, 102, 103, 104]
    assert [sources[key] for key in keys] == [
        str(user / FILE_NAME),
        str(here / FILE_NAME),
        "ZCACTOR_EAGER_LIMIT",
        "argument",
    ]
    assert sources["loop"] == "default"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("ZCACTOR_STORE_CAPACITY", "1073741824", "store_capacity", 1 << 30),
        ("ZCACTOR_STORE_CAPACITY", "1GiB", "store_capacity", 1 << 30),
        ("ZCACTOR_DEVICE_KEEP_NBYTES", "64 MiB", "device_keep_nbytes", 64 << 20),
        ("ZCACTOR_LOG_TO_DRIVER", "false", "log_to_driver", False),
        ("ZCACTOR_LOG_TO_DRIVER", "1", "log_to_driver", True),
        ("ZCACTOR_SHUTDOWN_TIMEOUT", "2.5", "shutdown_timeout", 2.5),
        ("ZCACTOR_LOOP", "asyncio", "loop", "asyncio"),
        ("ZCACTOR_ADDRESS", "host:1234", "address", "host:1234"),
        ("ZCACTOR_NAMESPACE", "mine", "namespace", "mine"),
        ("ZCACTOR_NAMESPACE", "42", "namespace", "42"),
        ("ZCACTOR_NUM_GPUS", "0", "num_gpus", 0),
    ],
)
def test_the_environment_is_read_by_the_type_of_the_field(
    here: Path, user: Path, variable: str, text: str, name: str, value: object
) -> None:
    config, sources = load(here, user, {variable: text})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)
    assert sources[name] == variable


def test_sizes_are_texts_in_files_and_in_a_config_too(here: Path, user: Path) -> None:
    (here / FILE_NAME).write_text('store_keep_nbytes = "1.5GiB"\n')
    assert load(here, user, {})[0].store_keep_nbytes == 3 << 29
    text: Any = "2KiB"
    assert Config(eager_limit=text).eager_limit == 2048
    (here / FILE_NAME).write_text('recv_depth = "1KiB"\n')
    with pytest.raises(TypeError, match="recv_depth = '1KiB' must be int"):
        load(here, user, {})
    (here / FILE_NAME).unlink()
    with pytest.raises(ValueError, match="eager_limit = '1GiB' must be at most 1,048,576"):
        load(here, user, {"ZCACTOR_EAGER_LIMIT": "1GiB"})


def test_empty_and_reserved_variables_set_nothing(here: Path, user: Path) -> None:
    environ = {"ZCACTOR_ADDRESS": "", "ZCACTOR_TOKEN": "secret", "ZCACTOR_FAIL": "worker:1", "PATH": "/bin"}
    config, sources = load(here, user, environ)
    assert config == Config()
    assert "secret" not in repr((config, sources))


def test_variables_of_kubernetes_services_are_passed_over(here: Path, user: Path) -> None:
    environ = {
        "ZCACTOR_SERVICE_HOST": "10.96.0.12",
        "ZCACTOR_SERVICE_PORT": "7433",
        "ZCACTOR_SERVICE_PORT_HEAD_RPC": "7433",
        "ZCACTOR_PORT": "tcp://10.96.0.12:7433",
        "ZCACTOR_PORT_7433_TCP": "tcp://10.96.0.12:7433",
        "ZCACTOR_PORT_7433_TCP_PROTO": "tcp",
        "ZCACTOR_PORT_7433_TCP_PORT": "7433",
        "ZCACTOR_PORT_7433_TCP_ADDR": "10.96.0.12",
        "ZCACTOR_PORT_53_UDP": "udp://10.96.0.12:53",
        "ZCACTOR_MY_HEAD_SERVICE_HOST": "fd00::1",
        "ZCACTOR_MY_HEAD_PORT": "sctp://[fd00::1]:9",
        "ZCACTOR_VERBS_PORT": "tcp://10.96.0.12:7433",  # of a Service called zcactor-verbs: no setting
    }
    config, sources = load(here, user, environ)
    assert config == Config()
    assert set(sources.values()) == {"default"}


@pytest.mark.parametrize(
    "variable", ["ZCACTOR_PORT", "ZCACTOR_SERVICE", "ZCACTOR_PORT_7433", "ZCACTOR_SERVICE_HOSTS", "ZCACTOR_PORT_X_TCP"]
)
def test_names_that_only_resemble_those_of_services_are_unknown(here: Path, user: Path, variable: str) -> None:
    with pytest.raises(ValueError, match=f"no setting '{variable}'"):
        load(here, user, {variable: "7433"})


def test_an_argument_that_is_none_is_not_given(here: Path, user: Path) -> None:
    config, sources = load(here, user, {"ZCACTOR_NUM_CPUS": "3"}, num_cpus=None)
    assert config.num_cpus == 3
    assert sources["num_cpus"] == "ZCACTOR_NUM_CPUS"


def test_the_user_directory_follows_the_environment(tmp_path: Path, here: Path) -> None:
    (tmp_path / "zcactor").mkdir()
    (tmp_path / "zcactor" / FILE_NAME).write_text('namespace = "mine"\n')
    config, _ = load_config(environ={"XDG_CONFIG_HOME": str(tmp_path)}, directory=here)
    assert config.namespace == "mine"


def test_an_unknown_key_of_a_file_names_file_key_and_the_close_one(here: Path, user: Path) -> None:
    (here / FILE_NAME).write_text("recv_dept = 3\n")
    with pytest.raises(ValueError, match="did you mean 'recv_depth'") as caught:
        load(here, user)
    for part in (str(here / FILE_NAME), "'recv_dept'", "Valid keys", "max_pending_calls"):
        assert part in str(caught.value)


def test_an_unknown_variable_names_the_close_one(here: Path, user: Path) -> None:
    with pytest.raises(ValueError, match="no setting 'ZCACTOR_ADRESS'; did you mean 'ZCACTOR_ADDRESS'"):
        load(here, user, {"ZCACTOR_ADRESS": "host:1"})


def test_no_variable_switches_the_native_part_off(here: Path, user: Path) -> None:
    with pytest.raises(ValueError, match="environment: there is no setting 'ZCACTOR_NATIVE'"):
        load(here, user, {"ZCACTOR_NATIVE": "0"})


def test_an_unknown_argument_is_a_type_error(here: Path, user: Path) -> None:
    with pytest.raises(TypeError, match="argument: there is no setting 'num_cpu'; did you mean 'num_cpus'"):
        load(here, user, num_cpu=3)


@pytest.mark.parametrize(
    ("line", "error", "expected"),
    [
        ("recv_depth = '3'", TypeError, "recv_depth = '3' must be int"),
        ("log_to_driver = 1", TypeError, "log_to_driver = 1 must be bool"),
        ("recv_depth = true", TypeError, "recv_depth = True must be int"),
        ("loop = 'trio'", ValueError, "loop = 'trio' must be Literal['auto', 'uvloop', 'asyncio']"),
        ("loop = 'all'", ValueError, "loop = 'all' must be Literal['auto', 'uvloop', 'asyncio']"),
        ("loop = 3", TypeError, "loop = 3 must be Literal['auto', 'uvloop', 'asyncio']"),
        ("recv_depth = 0", ValueError, "recv_depth = 0 must be int, finite and at least 4"),
        ("spawn_timeout = inf", ValueError, "spawn_timeout = inf must be float, finite"),
        ("spawn_timeout = nan", ValueError, "spawn_timeout = nan must be float, finite"),
        ("num_cpus = -1", ValueError, "num_cpus = -1 must be int | None"),
        ("[recv_depth]\nx = 1", TypeError, "recv_depth = {'x': 1} must be int"),
        ("recv_depth =", ValueError, "is not valid TOML"),
    ],
)
def test_a_bad_value_of_a_file_says_what_is_expected(
    here: Path, user: Path, line: str, error: type[Exception], expected: str
) -> None:
    (here / FILE_NAME).write_text(line)
    with pytest.raises(error) as caught:
        load(here, user)
    assert type(caught.value) is error
    assert str(here / FILE_NAME) in str(caught.value)
    assert expected in str(caught.value)


def test_a_bad_variable_names_itself(here: Path, user: Path) -> None:
    with pytest.raises(TypeError, match="ZCACTOR_NUM_CPUS: num_cpus = 'many' must be int"):
        load(here, user, {"ZCACTOR_NUM_CPUS": "many"})


def test_a_file_that_is_not_text_is_named(here: Path, user: Path) -> None:
    (user / FILE_NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not valid TOML"):
        load(here, user)


def test_texts_of_other_classes_become_plain_ones() -> None:
    class Text(str):
        def __str__(self) -> str:
            return "another"

    config = Config(namespace=Text("mine"), transports=Text("local,tcp"), security=Text("off"))
    assert (config.namespace, config.transports, config.security) == ("mine", "local,tcp", "off")
    assert {type(each) for each in (config.namespace, config.transports, config.security)} == {str}


def test_a_config_made_directly_is_checked_and_frozen() -> None:
    with pytest.raises(ValueError, match="^max_pending_calls = 0 must be int, finite and at least 1"):
        Config(max_pending_calls=0)
    with pytest.raises(TypeError, match="^recv_depth = None must be int"):
        Config(recv_depth=None)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().loop = "asyncio"  # type: ignore[misc]


ANY_PORT = Rdma(None, None, None, (0, 0, 0), None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("auto", ANY_PORT),
        ("off", ANY_PORT._replace(binding="none")),
        ("mlx5_0", ANY_PORT._replace(device="mlx5_0")),
        ("mlx5_0:1", ANY_PORT._replace(device="mlx5_0", port=1)),
        ("mlx5_0:255:65535", ANY_PORT._replace(device="mlx5_0", port=255, gid_index=65535)),
        ("mlx5_0::0", ANY_PORT._replace(device="mlx5_0", gid_index=0)),
        ("auto:2", ANY_PORT._replace(port=2)),
        ("binding=pyverbs", ANY_PORT._replace(binding="pyverbs")),
        ("auto,traffic_class=255,service_level=15,pkey_index=65535", ANY_PORT._replace(marks=(255, 15, 65535))),
        ("pkey_index=2,binding=ibverbs,traffic_class=0", ANY_PORT._replace(marks=(0, 0, 2), binding="ibverbs")),
    ],
)
def test_the_parts_of_rdma(text: str, parts: Rdma) -> None:
    assert rdma_of(Config(verbs=text).verbs) == parts


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "'auto', 'off' or 'device:port:gid'"), (":1", "'device:port:gid'"), ("off:1", "'device:port:gid'"),
        ("off,binding=pyverbs", "'device:port:gid'"), ("none", "'device:port:gid'"), (" ", "'device:port:gid'"),
        ("Off", "'device:port:gid'"), ("traffic_class", "'device:port:gid'"),
        ("a:0", "port must be a number from 1 to 255, not '0'"),
        ("a:256", "port must be"), ("a:1:65536", "gid must be a number from 0 to 65535"), ("a:1:2:3", "gid must be"),
        ("a:one", "port must be .* not 'one'"), ("a:\u0661", "port must be"), ("a,", "'' must be one of traffic_class"),
        ("a,b", "'b' must be one of"), ("lane=3", "'lane=3' must be one of"), ("service_level=16", "from 0 to 15"),
        ("traffic_class=256", "from 0 to 255"), ("traffic_class=", "traffic_class must be"),
        ("pkey_index=-1", "pkey_index must be"),
        ("pkey_index=" + "9" * 5000, "pkey_index must be"), ("pkey_index=1,pkey_index=1", "each once"),
        ("binding=none", "binding must be pyverbs or ibverbs, not 'none'"),
    ],
)  # fmt: skip
def test_parts_of_rdma_that_are_none(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^verbs is {re.escape(repr(text))}: .*{named}"):
        Config(verbs=text)


def test_a_setting_that_is_gone_names_what_to_write(here: Path, user: Path) -> None:
    with pytest.raises(TypeError, match="^argument: the setting 'verbs_device' is gone: write verbs='mlx5_0:1:3'"):
        load(here, user, verbs_device="mlx5_0")
    with pytest.raises(ValueError, match="^environment: the setting 'ZCACTOR_VERBS_BINDING' is gone: write verbs='"):
        load(here, user, {"ZCACTOR_VERBS_BINDING": "none"})
    (user / FILE_NAME).write_text("verbs_port = 1\n")
    with pytest.raises(ValueError, match="zcactor.toml: the setting 'verbs_port' is gone: write verbs='"):
        load(here, user)
    with pytest.raises(TypeError, match="the setting 'verbs_pkey_index' is gone: write verbs='pkey_index=2'"):
        Config(verbs_pkey_index=2)  # type: ignore[call-arg]


def test_every_number_has_a_least_value() -> None:
    numbers = {name for name, kind in get_type_hints(Config).items() if {int, float} & {kind, *get_args(kind)}}
    assert numbers == set(MINIMUM)


def test_every_field_is_documented() -> None:
    assert Config.__doc__ is not None
    for field in dataclasses.fields(Config):
        assert f"\n    {field.name}: " in inspect.cleandoc(Config.__doc__)


def test_defaults_alone_import_neither_toml_nor_msgspec(here: Path, user: Path) -> None:
    program = (
        "import sys, types\n"
        "package = sys.modules['zcactor'] = types.ModuleType('zcactor')  # without the imports of the package itself\n"
        "package.__path__ = [sys.argv[1]]\n"
        "from zcactor.config import load_config\n"
        "load_config(environ={}, directory=sys.argv[2], user_directory=sys.argv[3])\n"
        "print(sorted({'tomllib', 'msgspec', 'numpy', 'asyncio'} & set(sys.modules)))\n"
    )
    path = sys.modules[Config.__module__].__file__
    assert path is not None
    done = subprocess.run(
        [sys.executable, "-c", program, os.path.dirname(path), str(here), str(user)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("loop", "auto ", ValueError), ("security", True, TypeError),
        ("check", "words", ValueError), ("gpu", 3, TypeError), ("transports", ("tcp",), TypeError),
        ("host", 1, TypeError), ("ports", 7433, TypeError), ("security", Path("/certificates"), TypeError),
        ("namespace", None, TypeError), ("log_to_driver", "yes", TypeError),
        ("namespace", "\ud800", TypeError), ("host", "\ud800", TypeError), ("num_cpus", 1.5, TypeError),
        ("store_capacity", float(1 << 30), TypeError), ("verbs", True, TypeError),
        ("spawn_timeout", "60", TypeError), ("warn_after", float("nan"), ValueError),
    ],
)  # fmt: skip
def test_fields_take_values_of_their_type_alone(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name} = .* must be "):
        Config(**{name: value})
    with pytest.raises(error, match=rf"^{name} = .* must be "):
        dataclasses.replace(Config(), **{name: value})


@pytest.mark.parametrize("transports", ["", "local,", "local,ucx", "local,local", " local"])
def test_transports_are_known_and_named_once(transports: str) -> None:
    with pytest.raises(ValueError, match="transports must be some of local, verbs, tcp"):
        Config(transports=transports)
    assert Config(transports="tcp,verbs").transports == "tcp,verbs"


@pytest.mark.parametrize("address", ["", " ", "host:1,", ",host:1"])
def test_an_address_is_not_empty(address: str) -> None:
    with pytest.raises(ValueError, match="address must be 'host:port'"):
        Config(address=address)
    with pytest.raises(ValueError, match="argument: address must be 'host:port'"):
        load_config({"address": address})


@pytest.mark.parametrize("namespace", ["", "x" * 1_001])
def test_a_namespace_has_the_length_of_a_name(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace must have 1 to 1,000 characters"):
        Config(namespace=namespace)
    assert len(Config(namespace="x" * LONGEST_NAME).namespace) == LONGEST_NAME


def test_numbers_of_numpy_are_taken() -> None:
    given: dict[str, Any] = {"num_cpus": np.int64(3), "store_capacity": np.int64(1 << 30), "warn_after": np.float32(3)}
    config = Config(**given)
    assert (config.num_cpus, config.store_capacity, config.warn_after) == (3, 1 << 30, 3.0)
    assert [type(getattr(config, name)) for name in given] == [int, int, float]
    wrong: Any = np.float64(3)
    with pytest.raises(TypeError, match="num_cpus = .* must be "):
        Config(num_cpus=wrong)


@pytest.mark.parametrize("host", ["", "localhost", "10.0.0", "::g"])
def test_host_is_an_address(host: str) -> None:
    with pytest.raises(ValueError, match="host must be an IP address"):
        Config(host=host)
    assert Config(host="::1").host == "::1"


@pytest.mark.parametrize("text", ["", "rocm", "fake,devices=2", "cuda:0", "Fake:"])
def test_a_driver_of_gpus_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"^gpu must be one of auto, cuda, fake, off, or 'fake:' .* not '{text}'$"):
        Config(gpu=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [("verbs", "a:x"), ("security", "on"), ("security", "tls:/a\0b"), ("gpu", "rocm"), ("host", "here"), ("ports", "1"),
     ("transports", "udp")],
)  # fmt: skip
def test_errors_of_forms_name_their_source(here: Path, user: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^argument: {name} "):
        load_config({name: value}, environ={}, directory=here, user_directory=user)
    (here / FILE_NAME).write_text(f"{name} = {json.dumps(value)}\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(here))}/zcactor.toml: {name} "):
        load(here, user)
    if "\0" not in value:
        with pytest.raises(ValueError, match=f"^ZCACTOR_{name.upper()}: {name} "):
            load(user, user, {f"ZCACTOR_{name.upper()}": value})


def test_the_signature_has_the_settings() -> None:
    assert list(inspect.signature(Config).parameters) == [field.name for field in dataclasses.fields(Config)]


@pytest.mark.parametrize("text", ["9" * 30, "9" * 400, "1e3", "\u0661", "-1", "1..5GiB", "1.GiB", "GiB"])
def test_a_size_that_is_none_or_too_large_names_its_setting(here: Path, user: Path, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match="^argument: store_capacity = "):
        load(here, user, store_capacity=text)


def test_a_size_in_a_variable_may_be_none(here: Path, user: Path) -> None:
    assert load(here, user, {"ZCACTOR_STORE_CAPACITY": "null"})[0].store_capacity is None


def test_large_sizes_are_exact(here: Path, user: Path) -> None:
    for text, count in (("9223372036854775807", (1 << 63) - 1), ("9007199254740993", (1 << 53) + 1), ("1.5KiB", 1536)):
        assert load(here, user, device_keep_nbytes=text)[0].device_keep_nbytes == count


# ---- security


@pytest.mark.parametrize(
    ("security", "sealing", "integrity", "tls"),
    [
        ("auto", True, "auto", None), ("arrays", True, "arrays", None), ("frames", True, "frames", None),
        ("off", False, "auto", None), ("tls:/etc/zcactor/tls", True, "auto", "/etc/zcactor/tls"),
        ("tls:~/tls", True, "auto", "~/tls"),
    ],
)  # fmt: skip
def test_the_levels_of_security(here: Path, user: Path, security: str, sealing: bool, integrity: str, tls: str) -> None:
    config, sources = load(here, user, {"ZCACTOR_SECURITY": security})
    assert security_of(config.security) == (sealing, integrity, tls)
    assert sources["security"] == "ZCACTOR_SECURITY"


@pytest.mark.parametrize("text", ["", "on", "tls", "tls:", "tls:tls", "tls:./tls", "/tls", "Auto"])
def test_a_level_of_security_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="^security must be one of auto, arrays, frames, off, or 'tls:' and the absol"):
        Config(security=text)


def test_a_variable_that_is_no_text(here: Path, user: Path) -> None:
    with pytest.raises(TypeError, match=r"^ZCACTOR_WARN_AFTER: warn_after = '\\udcff' must be float"):
        load_config(environ={"ZCACTOR_WARN_AFTER": "\udcff"}, directory=here, user_directory=user)


@pytest.mark.parametrize(("name", "most"), [*MAXIMUM.items(), ("num_cpus", (1 << 63) - 1)])
def test_the_largest_value_of_a_setting(here: Path, user: Path, name: str, most: int) -> None:
    assert getattr(load_config({name: most}, environ={}, directory=here, user_directory=user)[0], name) == most
    with pytest.raises(ValueError, match=f"^argument: {name} = {most + 1} must be at most {most:,}"):
        load_config({name: most + 1}, environ={}, directory=here, user_directory=user)
    with pytest.raises(ValueError, match=f"^{name} = {most + 1} must be at most {most:,}"):
        Config(**{name: most + 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["fe80::1", "FE80::1", "febf::2", "fe80::1%eth0"])
def test_a_link_local_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=f"host is '{host}', a link-local address, .* scope global"):
        Config(host=host)


@pytest.mark.parametrize("host", ["fec0::1", "fe7f::1", "::1", "169.254.1.1"])
def test_other_addresses_are_taken(host: str) -> None:
    assert Config(host=host).host == host


@pytest.mark.parametrize("wrong", ["", "7434", "0-5", "8-7", "1-65536", "a-b", "1-2-3", " 1-2"])
def test_ports_that_are_none(wrong: str) -> None:
    with pytest.raises(ValueError, match="ports must be two ports from 1 to 65535.*'7434-7533', not"):
        Config(ports=wrong)


def test_ports() -> None:
    found, sources = load_config(
        environ={"ZCACTOR_PORTS": "7434-7435"}, directory="/nowhere", user_directory="/nowhere"
    )
    assert (list(ports_of(found.ports or "")), sources["ports"]) == ([7434, 7435], "ZCACTOR_PORTS")
    assert list(ports_of("65535-65535")) == [65535]
