"""Bring files that others measured or published into data/, checked, without editing by hand.

    python tools/import_measured.py published FOLDER   CSV files -> data/published/
    python tools/import_measured.py vllm FILE.csv      -> data/measured/vllm_h200_dcp.csv
    python tools/import_measured.py peers FILE.json    -> data/measured/{peers,probe}_h200.csv

CSV files are copied byte for byte once their schema holds. The peers' JSON is made tidy: one row a
group, shape, peer and mode. No number is converted or rounded on the way. Left out are the
per-kernel breakdown of a call (its number of launches is kept) and the small correctness cases
(kept as the column `checked`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import pandas as pd

from dcp_lab.analysis import tables
from dcp_lab.bench import costs, record

GQA_HEAD_DIM = 128
MLA_HEAD_DIM, MLA_HEAD_DIM_V = 576, 512
PAGE_SIZE = 16
# The probe reads 2^30 int32 values and copies as many.
PROBE_BYTES = 4 << 30

# In the group "gather" a row is checked where the run compared it on its own inputs, or where the
# same function passed the small cases of that process.
GATHER_SMALL_CASES = {
    "fa3_paged": "16q1kv/fa3",
    "fa3_paged_meta": "16q1kv/fa3_meta",
    "fa3_paged_meta32": "16q1kv/fa3_meta32",
    "tri_uni": "16q1kv/tri_uni",
    "fi_tc": "16q1kv/fi_tc",
}


def import_published(folder: Path, data: Path) -> list[Path]:
    """Copy the published tables, schemas checked, and return what was written."""
    written = []
    for name, schema in tables.PUBLISHED.items():
        written.append(_copy(folder / f"{name}.csv", data / "published" / f"{name}.csv", schema))
    return written


def import_vllm(file: Path, data: Path) -> list[Path]:
    """Copy the vLLM engine table, schema checked, and return what was written."""
    return [_copy(file, data / "measured" / "vllm_h200_dcp.csv", tables.VLLM)]


def import_peers(file: Path, data: Path) -> list[Path]:
    """Write the peers' and the probe's tables, schemas checked, and return what was written."""
    text = file.read_bytes()
    report = json.loads(text)
    source = f"{file.name} sha256:{hashlib.sha256(text).hexdigest()[:12]}"
    peers, probe = data / "measured" / "peers_h200.csv", data / "measured" / "probe_h200.csv"
    record.write_rows(peers, peers_rows(report, source), tables.PEERS, mode="replace")
    record.write_rows(probe, probe_rows(report, source), tables.PROBE, mode="replace")
    return [peers, probe]


def _copy(source: Path, target: Path, schema) -> Path:
    record.read_table(source, schema)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.new")
    beside.write_bytes(source.read_bytes())
    beside.replace(target)
    return target


def provenance(report: dict, source: str) -> dict[str, object]:
    """Return the provenance columns of a row made from the peers' report."""
    versions = report["groups"]["probe"]["versions"]
    gpu, driver = report["gpu"].split(", ")[:2]
    return {
        # The report's clock is UTC (time.gmtime).
        "date_utc": report["started"].replace(" ", "T") + "Z",
        "source": source,
        "gpu": gpu,
        "gpu_count": 1,
        "driver": driver,
        **{
            name: versions[name]
            for name in ("cuda", "torch", "triton", "vllm", "flashinfer", "python")
        },
    }


def probe_rows(report: dict, source: str) -> list[dict[str, object]]:
    """Return one row an access pattern of the bandwidth probe."""
    group = report["groups"]["probe"]
    return [
        {
            "pattern": pattern,
            "bytes": PROBE_BYTES * (2 if pattern == "copy" else 1),
            "gbps": gbps,
            "again_gbps": group["again"][pattern],
            **provenance(report, source),
        }
        for pattern, gbps in group["probe"].items()
    ]


def peers_rows(report: dict, source: str) -> list[dict[str, object]]:
    """Return one row a group, shape, peer and mode."""
    common = {
        "read_gbps": report["groups"]["probe"]["read_GBps"],
        "l2": "cold",
        **provenance(report, source),
    }
    rows = []
    for group, content in report["groups"].items():
        for shape in content["shapes"]:
            launches = content["launches"].get(shape["name"], {})
            for peer, result in shape["peers"].items():
                rows.append(
                    {
                        "group": group,
                        "shape": shape["name"],
                        "peer": peer,
                        "mode": "graph",
                        **_shape_columns(group, shape),
                        **_graph_columns(result),
                        "launches": len(launches[peer]) if peer in launches else None,
                        "bytes": shape["bytes"],
                        **common,
                    }
                )
        if "gather" in content:
            rows += [{**row, **common} for row in _gather_rows(group, content)]
    return rows


def _shape_columns(group: str, shape: dict) -> dict[str, object]:
    mla = group.startswith("mla")
    return {
        "requests": shape["b"],
        "context_tokens": shape["ctx"],
        "num_q_heads": shape["hq"],
        "num_kv_heads": shape["hkv"],
        "head_dim": MLA_HEAD_DIM if mla else GQA_HEAD_DIM,
        "head_dim_v": MLA_HEAD_DIM_V if mla else GQA_HEAD_DIM,
        "page_size": shape["page"],
        "kv_dtype": "float8_e4m3fn" if group == "fp8" else "bfloat16",
        "layers": shape["n"],
    }


def _graph_columns(result: dict) -> dict[str, object]:
    return {
        "median_us": result.get("us"),
        "min_us": result.get("min"),
        "p90_us": result.get("p90"),
        "again_us": result.get("again"),
        "out_error": result.get("rel"),
        "lse_error": result.get("lse_err"),
        "ok": result.get("ok"),
        "checked": "these inputs" if "ok" in result else None,
        "error": result.get("error"),
    }


def _gather_rows(group: str, content: dict) -> list[dict[str, object]]:
    """The gather group times every way in a graph and eagerly, host time apart."""
    gather = content["gather"]
    tokens = gather["b"] * gather["ctx"]
    shape = {**gather, "page": PAGE_SIZE, "n": gather["layers"]}
    rows = []
    for peer, result in gather["peers"].items():
        ok, checked = _gather_checked(peer, gather["checks"], content["small"])
        columns = {
            "group": group,
            "shape": f"{gather['b']}x{gather['ctx']}",
            "peer": peer,
            **_shape_columns(group, shape),
            "launches": result["launches"],
            "bytes": _gather_moved_bytes(peer, tokens, gather),
            "ok": ok,
            "checked": checked,
        }
        graph, again = result["graph"], result["again"]
        rows.append(
            {
                **columns,
                "mode": "graph",
                "median_us": graph["us"],
                "min_us": graph["min"],
                "p90_us": graph["p90"],
                "again_us": again["graph_us"],
            }
        )
        rows.append(
            {
                **columns,
                "mode": "eager",
                "median_us": result["eager_wall_us"],
                "again_us": again["eager_wall_us"],
                "host_us": result["eager_host_us"],
                "again_host_us": again["eager_host_us"],
            }
        )
    return rows


def _gather_checked(peer: str, checks: dict, small: dict) -> tuple[bool | None, str | None]:
    on_these_inputs = {
        "gather_token": checks["token"],
        "gather_page": checks["page"],
        "fa3_contig": checks["token_fa3"]["ok"] and checks["page_fa3"]["ok"],
        "token_then_fa3": checks["token"] and checks["token_fa3"]["ok"],
        "page_then_fa3": checks["page"] and checks["page_fa3"]["ok"],
    }
    if peer in on_these_inputs:
        return on_these_inputs[peer], "these inputs"
    if peer in GATHER_SMALL_CASES:
        return small[GATHER_SMALL_CASES[peer]]["ok"], "small cases"
    return None, None


def _gather_moved_bytes(peer: str, tokens: int, gather: dict) -> int:
    """Least bytes a way moves, which the report lacks here; without the LSE, as elsewhere."""
    kv = costs.kv_bytes(tokens, num_kv_heads=gather["hkv"], head_dim=GQA_HEAD_DIM, kv_itemsize=2)
    q_and_out = gather["b"] * gather["hq"] * 2 * GQA_HEAD_DIM * 2
    if peer in ("gather_token", "gather_page"):
        return int(2 * kv)
    if peer in ("token_then_fa3", "page_then_fa3"):
        return int(3 * kv + q_and_out)
    return int(kv + q_and_out)


def main(arguments: list[str] | None = None) -> None:
    """Run one import and print what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("published", "vllm", "peers"))
    parser.add_argument("source", type=Path, help="file or folder to import")
    given = parser.parse_args(arguments)
    importer = {"published": import_published, "vllm": import_vllm, "peers": import_peers}
    for path in importer[given.what](given.source, tables.data_dir()):
        print(f"{path.relative_to(tables.data_dir().parent)}: {len(pd.read_csv(path))} rows")


if __name__ == "__main__":
    main()
