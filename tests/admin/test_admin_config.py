"""The cluster file: what is accepted, what is refused and in which words; its documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scheduler import config as cluster_file
from scheduler.config import ClusterConfig, ConfigError, parse
from scheduler.configkeys import SECTIONS
from scheduler.core.state import Settings
from scheduler.provision.template import default_text

ROOT = Path(__file__).resolve().parents[2]
NODES = '[nodes."n[1-2]"]\ninstance_type = "trn1.2xlarge"\n'


def read(text: str, home: str = "/srv/one") -> ClusterConfig:
    return parse(text, Path("cluster.toml"), Path(home))


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return caught.value.problems


def test_default_cluster() -> None:
    config = read(default_text())
    nodes = config.nodes()
    assert [n.name for n in nodes] == [f"trn1-00{i}" for i in range(1, 6)]
    assert [n.spare for n in nodes] == [False] * 4 + [True]
    assert nodes[0].cpus == 128
    assert nodes[0].mem_mib == 512 * 1024
    assert [d.cores for d in nodes[0].devices] == [2] * 16
    (main,) = config.partitions()
    assert main.default
    assert main.nodes == [n.name for n in nodes]
    assert config.settings() == Settings()


def test_logical_cores_of_trn2() -> None:
    (node,) = read('[nodes.a]\ninstance_type = "trn2.48xlarge"\n').nodes()
    assert [d.cores for d in node.devices] == [4] * 16


def test_addresses_differ_between_nodes_and_clusters() -> None:
    text = '[nodes."n[1-600]"]\ninstance_type = "inf2.xlarge"\n'
    one, two = read(text).hosts(), read(text, "/srv/two").hosts()
    assert len(set(one.values())) == 600
    assert not set(one.values()) & set(two.values())
    assert one == read(text).hosts()
    for address in one.values():
        parts = [int(part) for part in address.split(".")]
        assert parts[0] == 127
        assert 0 < parts[3] < 255


def test_every_setting_of_the_core_has_a_key() -> None:
    keys = {key.setting: key for keys in SECTIONS.values() for key in keys if key.setting}
    assert set(keys) == set(Settings.__struct_fields__)
    for name, key in keys.items():
        assert key.default == getattr(Settings(), name), name


def test_settings_come_from_their_sections() -> None:
    config = read(
        NODES + '[timeouts]\nkill_wait_s = 2\n[scheduling]\nenforce_part_limits = "NO"\n'
        "[priority]\nweight_age = 7\n"
    )
    settings = config.settings()
    assert settings.kill_wait_s == 2.0
    assert settings.enforce_part_limits == "NO"
    assert settings.priority_weight_age == 7


def test_partition_times() -> None:
    config = read(NODES + '[partitions.p]\nmax_time = "1-00:00:00"\ndefault_time = "30"\n')
    (partition,) = config.partitions()
    assert partition.max_time_s == 86400
    assert partition.default_time_s == 1800


def test_ssh_nodes_take_section_and_own_values() -> None:
    config = read(
        '[ssh]\nuser = "u"\nport = 2022\n'
        '[nodes."h[1-2]"]\ninstance_type = "trn1.2xlarge"\ntransport = "ssh"\n'
        'address = "10.0.0.[7-8]"\nport = 2200\n'
        '[nodes.h3]\ninstance_type = "trn1.2xlarge"\ntransport = "ssh"\n'
    )
    assert config.specs["h1"].ssh.port == 2200
    assert config.specs["h3"].ssh.port == 2022
    assert config.specs["h1"].ssh.user == "u"
    assert config.hosts() == {"h1": "10.0.0.7", "h2": "10.0.0.8"}
    assert config.specs["h3"].address == "h3"


REFUSED = [
    ("[cluster]\nnam = 'x'\n" + NODES, ":2: unknown key 'nam' in [cluster]; did you mean 'name'?"),
    (NODES + "[timeout]\n", ":3: unknown section 'timeout'; did you mean 'timeouts'?"),
    (NODES + "spair = true\n", "unknown key 'spair' in [nodes.n[1-2]]; did you mean 'spare'?"),
    (NODES + "cpus = 0\n", ":3: [nodes.n[1-2]] cpus: must be 1 to 65535, not 0"),
    (NODES + "cpus = true\n", "cpus: must be an integer, not a boolean (True)"),
    (NODES + "spare = 1\n", "spare: must be true or false, not an integer (1)"),
    (NODES + "features = 'x'\n", "features: must be a list"),
    (NODES + "port = 22\n", 'port needs transport = "ssh"'),
    (NODES + "transport = 'telnet'\n", "transport: must be one of local, ssh, not text"),
    (NODES + "transport = 'ssh'\naddress = 'a'\n", ":4: [nodes.n[1-2]] address: 1 addresses for 2"),
    ("[nodes.a]\ninstance_type = 'trn1.32xlarg'\n", "did you mean 'trn1.32xlarge'?"),
    ("[nodes.a]\n", "[nodes.a] needs the key 'instance_type'"),
    ("[nodes.a_b]\ninstance_type = 'trn1.2xlarge'\n", "'a_b' is no host name"),
    (NODES + "[nodes.n2]\ninstance_type = 'trn1.2xlarge'\n", "node n2 is described twice"),
    (NODES + "spare = true\n", "every node is a spare"),
    ("[cluster]\n", "no nodes"),
    ("nodes = 3\n", "[nodes] must hold tables"),
    (NODES + "[partitions.p]\nnodes = 'n[1-3]'\n", ":4: [partitions.p] nodes: no node 'n3'"),
    (NODES + "[partitions.p]\nmax_time = 'soon'\n", "[partitions.p] max_time:"),
    (NODES + "[partitions.p]\nmax_time = '1'\ndefault_time = '2'\n", "longer than max_time"),
    (NODES + "[partitions.p]\n[partitions.q]\n", "none of them has default = true"),
    (
        NODES + "[partitions.p]\ndefault = true\n[partitions.q]\ndefault = true\n",
        ":6: partitions p and q are both the default",
    ),
    (NODES + "[timeouts]\nkill_wait_s = 'x'\n", "kill_wait_s: must be a number of seconds"),
    (NODES + "[timeouts]\nkill_wait_s = nan\n", "kill_wait_s: must be 0 to 86400 seconds, not nan"),
    (NODES + "[timeouts]\nheartbeat_s = 20\n", "node_timeout_s must be longer than heartbeat_s"),
    ("[cluster\n", "not valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused(text: str, message: str) -> None:
    found = problems(text)
    assert any(message in problem for problem in found), found
    assert all(problem.startswith("cluster.toml") for problem in found)


def test_all_problems_are_reported_together() -> None:
    assert len(problems("[cluster]\nnam = 1\n[nodes.a]\nx = 1\n[partitions.p]\ny = 1\n")) >= 4


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such cluster file"):
        cluster_file.load(tmp_path)
    (tmp_path / "cluster.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        cluster_file.load(tmp_path)


def documented() -> dict[str, list[tuple[str, str, str]]]:
    """Section -> (key, type, default) of the tables in docs/cluster-file.md."""
    result: dict[str, list[tuple[str, str, str]]] = {}
    section = ""
    for line in (ROOT / "docs/cluster-file.md").read_text().splitlines():
        header = re.match(r"### \[(\w+)", line)
        if header:
            section = header[1]
            result[section] = []
        elif section and line.startswith("| ") and not line.startswith("| key "):
            key, kind, default, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            assert meaning, key
            result[section].append((key, kind, default))
    return result


def test_documentation_lists_the_same_keys() -> None:
    coded = {
        section: [(key.name, key.kind, key.default_text()) for key in keys]
        for section, keys in SECTIONS.items()
    }
    assert documented() == coded


@pytest.mark.parametrize("number", [0, 1])
def test_documented_examples_are_valid(number: int) -> None:
    text = (ROOT / "docs/cluster-file.md").read_text()
    assert read(re.findall(r"```toml\n(.*?)```", text, re.S)[number]).specs
