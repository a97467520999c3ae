"""The table, results.md, and the chart."""

import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path

from engine import HERE, say

CONTENDERS = """\
| contender | |
|---|---|
| (a) | `INSERT … ON CONFLICT DO NOTHING`, no result |
| (b) | the same, and `UPDATE … SET result` |
| (c) | PL/pgSQL claim function: `pg_advisory_xact_lock`, look-up, request hash, INSERT; then UPDATE |
| (d) | atomic phases: recovery points, three SERIALIZABLE transactions |
| (e) | as (b), with `expires_at`, its index, batched DELETE, autovacuum |
| (f) | as (b), in daily partitions of which the oldest is dropped |
| no key | the work alone |

Their SQL is in [contenders](contenders)."""

HOW = """\
Each ratio is the median of {pairs} pairs, with its quartiles; the two slices of a pair, of about {seconds:g} s and of the
same number of transactions, follow each other, in turned order, in one run on one server. pgbench, prepared protocol, on the
same machine. *Measured* is idem's transactions a second over the other's, where the row says nothing else; *× CPU* the other's processor time of
the server a transaction over idem's: above 1, idem is ahead. Both sides of a row with a target make the same number of round trips,
but for `idem_run`, whose point that is, and batches. {rows:,} keys are there before, idem's spread over four generations. Keys are random.
`sync` is `synchronous_commit`. Targets are meant for 8 clients and `sync off`, where a small machine is busy; with
`sync on` most of the time is the disk's, the same for both. Not every combination is measured, to stay within a quarter of an hour."""


def cpu_model():
    with open("/proc/cpuinfo") as f:
        found = re.search(r"^model name\s*: (.*)$", f.read(), re.M)
    return found[1] if found else platform.machine()


def machine(server, options):
    with open("/proc/meminfo") as f:
        memory = int(re.search(r"MemTotal:\s+(\d+)", f.read())[1]) / 2**20
    version = server.ask("SHOW server_version")
    settings = ", ".join(f"`{name} = {value}`" for name, value in options.settings.items())
    load = os.getloadavg()[2]
    return (f"{len(os.sched_getaffinity(0))} cores, {cpu_model()}, {memory:.0f} GB, {platform.system()} "
            f"{platform.release()}; load average of the quarter of an hour before the end {load:.1f}; "
            f"PostgreSQL {version}; {settings}, all else as initdb makes it.")


def verdict(result):
    if result.holds is None:
        return "", ""
    limit = f"{'≤' if result.at_most else '≥'} {result.target:g}{result.unit}"
    return limit, "holds" if result.holds else "**behind**"


def line(*cells):
    return "| " + " | ".join(str(c) for c in cells) + " |"


def goals(results):
    """The rows of the design's table, each at the combination that judges."""
    yield line("work", "against", "where", "measured", "target", "")
    yield "|---|---|---|---|---|---|"
    for r in results:
        if r.section and r.judges:
            yield line(r.work, r.against, r.where, f"{r.value}{r.unit}", *verdict(r))
    if not any(r.row == "steady" for r in results):
        yield line("steady state at 10 M live keys; a claim at 10 M", "", "", "`make bench SIZE=large`", "", "")


def everything(results):
    yield line("work", "against", "where", "measured", "× CPU", "target", "", "a second; µs CPU; bytes of WAL")
    yield "|---|---|---|---|---|---|---|---|"
    for r in results:
        sides = "; ".join(f"{label} {side['/s']:,.0f}, {side['µs CPU']:,.0f}, {side['B WAL']:,.0f}"
                          for label, side in r.sides.items())
        yield line(r.work, r.against, r.where, f"{r.value}{r.unit}",
                   r.cpu or "", *verdict(r), sides)


def figures(found):
    yield line("figure", "")
    yield "|---|---|"
    for f in found:
        yield line(f.what, ", ".join(f"{k} **{v}**" for k, v in f.values.items()))


def chart(results, base):
    """Bars of throughput against the other side, whiskers for the quartiles."""
    rows = ("field", "hot", "long", "large", "batch", "bulk", "steady")
    bars = [r for r in results if r.unit == "×" and not r.at_most and r.judges
            and (r.section or r.row in rows) and not r.where.startswith("WAL")]
    with tempfile.TemporaryDirectory() as tmp:
        data = Path(tmp, "bars")
        data.write_text("".join(
            f'"{label(r)}"\t{i}\t{r.value.median}\t{r.value.low}\t{r.value.high}\t{r.target or "NaN"}\n'
            for i, r in enumerate(reversed(bars))))
        for terminal, name in (("svg size 1000,{h} dynamic font 'sans,13' background 'white'", "svg"),
                               ("png size 1000,{h} font 'sans,11' background '#ffffff'", "png")):
            script = f"""
                set terminal {terminal.format(h=140 + 30 * len(bars))}
                set output '{base}.{name}'
                data = '{data}'
            """ + (HERE / "chart.gp").read_text()
            subprocess.run(["gnuplot"], input=script, text=True, check=True)


def label(r):
    against = r.against.split(" ")[0] if r.against.startswith("(") else r.against
    against = against.replace("prepared SELECT … WHERE key =", "SELECT")
    return f"{r.work} : {against}".replace("`", "").replace("_", 2 * "\\" + "_")


def write(server, results, options, took):
    compared = [r for r in results if hasattr(r, "value")]
    found = [r for r in results if not hasattr(r, "value")]
    import rows
    text = "\n".join([
        "# What idem costs", "",
        f"Written by `make bench{' SIZE=large' if options.size == 'large' else ''}` in {took / 60:.0f} minutes. "
        "Ratios, not promises: run it on your machine.", "",
        machine(server, options), "",
        *goals(compared), "",
        "![Throughput against the other side](results.svg)", "",
        "## All comparisons", "",
        HOW.format(pairs=options.pairs, seconds=options.seconds, rows=rows.ROWS), "",
        *everything(compared), "",
        "## Figures", "",
        *figures(found), "",
        "## Contenders", "", CONTENDERS, ""])
    (HERE / "results.md").write_text(text)
    chart(compared, HERE / "results")
    print("\n".join(goals(compared)))
    behind = [r for r in compared if r.holds is False]
    say(f"\n{len([r for r in compared if r.holds])} hold, {len(behind)} behind; "
        "test/bench/results.md has all, results.svg and results.png the chart")
