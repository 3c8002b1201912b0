"""The tables under data/ keep their schemas, and the dictionary names every one of them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from dcp_lab.analysis import tables
from dcp_lab.bench import record

REPO = Path(__file__).resolve().parents[1]
DATA = REPO / "data"
FILES = sorted(DATA.glob("*/*.csv"))


def load_tool():
    """tools/ is no package: load the importer from its file."""
    spec = importlib.util.spec_from_file_location(
        "import_measured", REPO / "tools" / "import_measured.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def schema_of(file: Path):
    """The schema of a table by its folder and name."""
    if file.parent.name == "published":
        return tables.PUBLISHED[file.stem]
    if file.parent.name == "compiled":
        return tables.COMPILED[file.stem]
    return tables.measured_schema(file.stem)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_table_keeps_its_schema(file):
    """Each CSV under data/ has a schema and keeps it."""
    assert len(record.read_table(file, schema_of(file))) > 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_dictionary_names_every_table_and_column(file):
    """data/README.md has the file by name, and each of its columns in backticks."""
    text = (DATA / "README.md").read_text()
    assert f"`{file.parent.name}/{file.name}`" in text
    missing = [name for name in schema_of(file).columns if f"`{name}`" not in text]
    assert not missing


def test_dictionary_has_the_tables_that_are_there():
    """Each file has its heading, and each heading its file."""
    text = (DATA / "README.md").read_text()
    headings = "\n".join(re.findall(r"^### .*$", text, flags=re.M))
    named = set(re.findall(r"`((?:published|measured|compiled)/\w+\.csv)`", headings))
    there = {f"{file.parent.name}/{file.name}" for file in FILES}
    assert named == there


def test_rows_called_h200_were_measured_on_h200():
    """A table named after a machine holds no row of another one."""
    for file in (DATA / "measured").glob("*_h200*.csv"):
        assert set(tables.measured(file.stem).gpu) == {"NVIDIA H200"}, file.name


def test_published_serve_has_study_1():
    """Two settings, three variants, and the numbers that the study is known by."""
    serve = tables.published_serve()
    tpot = serve[serve.metric == "Mean TPOT (ms)"].set_index(["setting", "variant"]).value
    assert tpot[1, "dcp1_full"] == 20.23
    assert tpot[1, "dcp2"] == 83.35
    assert len(tpot) == 6
    lengths = serve.groupby("setting")[["input_len", "output_len"]].first()
    assert lengths.to_numpy().tolist() == [[2000, 1000], [1000, 4000]]


def test_published_serve_is_consistent_with_itself():
    """Output throughput times duration gives the generated tokens, within rounding."""
    wide = tables.published_serve().pivot(
        index=["setting", "variant"], columns="metric", values="value"
    )
    made = wide["Output token throughput (tok/s)"] * wide["Benchmark duration (s)"]
    assert (made / wide["Total generated tokens"] - 1).abs().max() < 1e-3


def test_published_gsm8k_agree_across_dcp():
    """DCP 2 answers as well as DCP 1, within two standard errors."""
    wide = tables.published_gsm8k().pivot(index="filter", columns="dcp_size")
    gap = (wide["value"][2] - wide["value"][1]).abs()
    assert (gap < 2 * wide["stderr"].max(axis=1)).all()


def test_published_graph_modes_has_study_2():
    """148 ms under PIECEWISE, 40 ms under full graphs, no request failed."""
    modes = tables.published_graph_modes().set_index("cudagraph_mode")
    assert modes.mean_tpot_ms.to_dict() == {"PIECEWISE": 148.0, "FULL_AND_PIECEWISE": 40.0}
    assert (modes.requests_ok == modes.requests).all()


def test_measured_vllm_has_no_gather():
    """The engine runs on H200s read the paged cache directly, each of them."""
    assert set(tables.measured_vllm().gathers_kv) == {"no"}


def test_measured_peers_has_the_gather_both_ways():
    """Each gather path is timed in a graph and eagerly, and its result was checked."""
    peers = tables.measured_peers()
    gather = peers[
        (peers.group == "gather") & peers.peer.str.contains("token|page_then|gather_page")
    ]
    assert set(gather["mode"]) == {"eager", "graph"}
    assert gather.ok.all()
    assert gather[gather["mode"] == "eager"].host_us.notna().all()


def test_a_failed_peer_keeps_its_error():
    """A peer that does not take a shape has its message and no time."""
    failed = tables.measured_peers().query("error.notna()")
    assert failed.median_us.isna().all()
    assert failed.error.str.contains("Unsupported group_size").all()
    assert len(failed) > 0


def test_data_folder_can_be_named(monkeypatch, tmp_path):
    """DCP_LAB_DATA leads the readers elsewhere; a folder without data is refused."""
    monkeypatch.setenv("DCP_LAB_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"expected a folder with published/ in it"):
        tables.published_serve()
    (tmp_path / "published").mkdir()
    text = (DATA / "published" / "kimi_k3_tp8_dcp8_graph_modes.csv").read_text()
    (tmp_path / "published" / "kimi_k3_tp8_dcp8_graph_modes.csv").write_text(
        text.replace("148", "149")
    )
    assert tables.published_graph_modes().mean_tpot_ms.tolist() == [149.0, 40.0]


def test_unknown_names_are_refused(monkeypatch, tmp_path):
    """A kind that does not exist, and a table that was not measured yet, are told apart."""
    with pytest.raises(ValueError, match=r"KIND of \['accuracy', 'decode', .*got 'speed_h200'"):
        tables.measured("speed_h200")
    (tmp_path / "published").mkdir()
    monkeypatch.setenv("DCP_LAB_DATA", str(tmp_path))
    assert not tables.is_measured("decode_h200")
    with pytest.raises(FileNotFoundError, match=r"\(no table\), got 'decode_h200'"):
        tables.measured("decode_h200")


@pytest.mark.parametrize(
    ("name", "old", "new", "match"),
    [
        pytest.param(
            "qwen3_235b_tp8_serve",
            "Mean TPOT (ms),83.35",
            "Mean TPOT,83.35",
            "every metric for each setting and variant",
            id="a metric under another name",
        ),
        pytest.param(
            "qwen3_235b_tp8_serve",
            "1,2000,1000,dcp2,2,not stated,Mean TPOT",
            "1,2500,1000,dcp2,2,not stated,Mean TPOT",
            "one input_len and output_len a setting",
            id="another length in the same setting",
        ),
        pytest.param(
            "qwen3_235b_tp8_serve",
            "dcp2,2,not stated,Mean TPOT",
            "dcp2,1,not stated,Mean TPOT",
            "one dcp_size and cudagraph_mode a variant",
            id="another DCP size in the same variant",
        ),
        pytest.param(
            "kimi_k3_tp8_dcp8_graph_modes",
            "40,40,40",
            "40,41,40",
            "requests_ok <= requests",
            id="more answers than requests",
        ),
        pytest.param(
            "qwen3_235b_tp8_gsm8k", "0.9136", "9.136", "value: expected 0 to 1", id="a share of 9"
        ),
        pytest.param(
            "qwen3_235b_tp8_gsm8k", "strict-match", "flexible-extract", "unique", id="a row twice"
        ),
    ],
)
def test_published_schemas_notice_damage(tmp_path, name, old, new, match):
    """A changed cell that breaks the table's own logic is refused on reading."""
    text = (DATA / "published" / f"{name}.csv").read_text()
    assert old in text
    damaged = tmp_path / f"{name}.csv"
    damaged.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=match):
        record.read_table(damaged, tables.PUBLISHED[name])


@pytest.mark.parametrize(
    ("name", "old", "new", "match"),
    [
        pytest.param(
            "vllm_h200_dcp",
            ",2,2,a2a,",
            ",2,2,,",
            "a dcp_comm_backend where dcp_size > 1",
            id="dcp",
        ),
        pytest.param("vllm_h200_dcp", "6.21,ms", "6.21,tokens", "tpot in ms", id="unit"),
        pytest.param(
            "peers_h200", "22.7,22.62,", "22.7,23.62,", "min_us <= median_us", id="order"
        ),
        pytest.param("peers_h200", ",True,these", ",False,these", "ok to be true", id="not ok"),
        pytest.param("peers_h200", ",22.7,22.62,", ",,22.62,", "median_us or error", id="no time"),
        pytest.param("probe_h200", "sha256:", "sha1:", "source: expected text like", id="source"),
    ],
)
def test_measured_schemas_notice_damage(tmp_path, name, old, new, match):
    """A changed cell that breaks the table's own logic is refused on reading."""
    text = (DATA / "measured" / f"{name}.csv").read_text()
    assert old in text
    damaged = tmp_path / f"{name}.csv"
    damaged.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=match):
        record.read_table(damaged, tables.measured_schema(name))


def small_report() -> dict:
    """A peers' report with one row of each sort, made by hand."""
    graph = {"us": 20.0, "min": 19.0, "p90": 21.0}
    again = {"graph_us": 20.5, "eager_host_us": 27.0, "eager_wall_us": 28.0}
    way = {
        "graph": graph,
        "eager_host_us": 27.3,
        "eager_wall_us": 28.7,
        "launches": 4,
        "kernels": [["by_token", 21.3]],
        "again": again,
    }
    ok = {"rel": 0.002, "lse_err": 1e-6, "ok": True}
    versions = {
        "python": "3.12.3",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "triton": "3.6.0",
        "vllm": "0.25.1",
        "flashinfer": "0.6.13",
    }
    shape = {
        "name": "16x32",
        "b": 16,
        "ctx": 32,
        "hq": 16,
        "hkv": 1,
        "page": 16,
        "n": 8,
        "bytes": 9,
    }
    peers = {
        "fa3": {**ok, "us": 10.0, "min": 9.0, "p90": 11.0, "again": 10.1},
        "fi_cc": {"error": "RuntimeError: no"},
        "rdpg": {"us": 2.0, "min": 2.0, "p90": 2.0, "again": 2.1},
    }
    probe = {"read": 4700.0, "copy": 4300.0}
    return {
        "started": "2026-11-29 19:35:29",
        "gpu": "NVIDIA H200, 580.159.04, 345 MHz",
        "groups": {
            "probe": {
                "shapes": [],
                "launches": {},
                "versions": versions,
                "probe": probe,
                "again": probe,
                "read_GBps": 4700.0,
            },
            "gather": {
                "shapes": [],
                "launches": {},
                "small": {"16q1kv/fa3": ok},
                "gather": {
                    "b": 16,
                    "ctx": 32,
                    "hq": 16,
                    "hkv": 1,
                    "layers": 8,
                    "checks": {"token": True, "page": True, "token_fa3": ok, "page_fa3": ok},
                    "peers": {"token_then_fa3": way, "fa3_paged": way, "fa3_contig_cold": way},
                },
            },
            "gqa16": {
                "shapes": [{**shape, "peers": peers}],
                "launches": {"16x32": {"fa3": [["a", 1.0], ["b", 2.0]]}},
            },
        },
    }


def test_import_makes_one_row_a_shape_peer_and_mode(tmp_path):
    """The tidy table has each number of the report in its place, and the source's digest."""
    source = tmp_path / "peers_h200.json"
    source.write_text(json.dumps(small_report()))
    load_tool().import_peers(source, tmp_path)
    peers = record.read_table(tmp_path / "measured" / "peers_h200.csv", tables.PEERS)
    row = peers.set_index(["group", "peer", "mode"]).sort_index()
    assert len(row) == 9
    fa3 = row.loc["gqa16", "fa3", "graph"]
    assert [fa3.median_us, fa3.min_us, fa3.p90_us, fa3.again_us] == [10.0, 9.0, 11.0, 10.1]
    assert (fa3.launches, fa3.bytes, fa3.read_gbps, fa3.checked) == (2, 9, 4700.0, "these inputs")
    assert row.loc["gqa16", "fi_cc", "graph"].error == "RuntimeError: no"
    eager = row.loc["gather", "token_then_fa3", "eager"]
    assert [eager.median_us, eager.host_us, eager.again_us, eager.launches] == [
        28.7,
        27.3,
        28.0,
        4,
    ]
    # 512 tokens of 512 bytes: read, written, read again; q and out of 16 x 16 x 128 bf16.
    assert eager.bytes == 3 * 512 * 512 + 2 * 16 * 16 * 128 * 2
    assert row.loc["gather", "fa3_paged", "graph"].checked == "small cases"
    assert row.loc["gather", "fa3_contig_cold", "graph"][["ok", "checked"]].isna().all()
    assert re.fullmatch(r"peers_h200.json sha256:[0-9a-f]{12}", peers.source[0])
    probe = record.read_table(tmp_path / "measured" / "probe_h200.csv", tables.PROBE)
    assert probe.set_index("pattern").gbps.to_dict() == {"read": 4700.0, "copy": 4300.0}


def test_import_twice_gives_the_same_files(tmp_path):
    """The importer has no clock and no order of its own."""
    source = tmp_path / "peers_h200.json"
    source.write_text(json.dumps(small_report()))
    tool = load_tool()
    first = [path.read_bytes() for path in tool.import_peers(source, tmp_path)]
    assert [path.read_bytes() for path in tool.import_peers(source, tmp_path)] == first


def test_import_copies_published_tables_byte_for_byte(tmp_path):
    """Importing what is in data/published gives the same bytes again."""
    for path in load_tool().import_published(DATA / "published", tmp_path):
        assert path.read_bytes() == (DATA / "published" / path.name).read_bytes()


def test_import_refuses_a_table_that_breaks_its_schema(tmp_path):
    """A source that does not keep the schema is not copied."""
    source = tmp_path / "vllm.csv"
    source.write_text(
        (DATA / "measured" / "vllm_h200_dcp.csv").read_text().replace("tpot", "TPOT")
    )
    with pytest.raises(ValueError, match="metric: expected one of tpot, kv_cache_capacity"):
        load_tool().import_vllm(source, tmp_path / "data")
    assert not (tmp_path / "data").exists()
