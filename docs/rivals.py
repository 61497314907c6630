"""Makes docs/rivals.md's table and pictures, of sweeps that are finished: python docs/rivals.py [--speed] SWEEP...

    python docs/rivals.py --speed --output=docs runs/sweep-rivals_small-*

SWEEP is the working directory of a sweep, with its runs. Scores are of the test split, as the runs have them at their
end; curves over time are of the first sentences of the validation split, as many as the runs translate on their way.
Time is that of training alone, at the highest rate that a run of the model has logged over some steps: what other work
on the machine did to the others is left out. With --speed, the first seed of each model translates the test split too,
all models in turn, several times; nothing else should run meanwhile.
"""

import collections
import math
import pathlib
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from transformer_flax import cli
from transformer_flax.errors import UserError

OUTPUT = flags.DEFINE_string("output", None, "folder of the pictures, rivals_time.png and rivals_length.png")
SPEED = flags.DEFINE_bool("speed", False, "also measure how fast the models translate")
REPEATS = flags.DEFINE_integer("repeats", 3, "timed translations of the test split by each model", 1)
EDGES = (8, 11, 14, 18, math.inf)  # words of a source, at most
NAMES = {"recurrent none": "recurrent, no attention"}


def main(*sweeps: str) -> None:
    if not sweeps:
        raise UserError("name the working directories of sweeps, such as runs/sweep-rivals_small-*")
    runs = collections.defaultdict(list)
    for sweep in map(pathlib.Path, sweeps):
        for run in read(sweep):
            runs[name_of(run[1])].append(run)
    for each in runs.values():
        require_alike([place for _, place in each])
    lengths = {name: [by_length(place) for _, place in each] for name, each in runs.items()}
    minutes = {name: minutes_a_step([place for _, place in each]) for name, each in runs.items()}
    speeds = measure_speed({name: each[0][1] for name, each in runs.items()}) if SPEED.value else {}
    print_table(runs, minutes, speeds)
    print_lengths(lengths)
    if OUTPUT.value is not None:
        draw(runs, minutes, lengths, pathlib.Path(OUTPUT.value))


def read(sweep: pathlib.Path):
    """The finished runs of a sweep, each with its working directory."""
    from transformer_flax.ablation import results
    from transformer_flax.ablation.trials import folder_name
    from transformer_flax.training.run_directory import RunDirectory

    finished = [run for run in results.read(sweep / results.RESULTS)[1] if run.finished]
    return [(run, RunDirectory(sweep / folder_name(run.variant) / f"seed{run.seed}")) for run in finished]


def require_alike(places) -> None:
    """Refuses to average runs that differ in more than their seeds."""
    from transformer_flax.ablation.results import require_same_base
    from transformer_flax.training.config_fields import flatten

    for place in places[1:]:
        first, other = (flatten(each.load_config().to_dict()) for each in (places[0], place))
        require_same_base(first, other, place.path)


def name_of(place) -> str:
    """Returns the model's name: its kind, and its attention where that is a choice."""
    model = place.load_config().model
    name = f"{model.kind} {model.attention}" if model.kind == "recurrent" else model.kind
    return NAMES.get(name, name.replace(" ", ", "))


def by_length(place) -> list[float]:
    """BLEU of the test split, of the sources up to each of EDGES."""
    from transformer_flax.analysis.scores_by_length import load_written
    from transformer_flax.decoding.scoring import score

    triples = load_written(place, "test")
    scores = []
    for shortest, longest in zip((0, *EDGES), EDGES, strict=False):
        own = [triple for triple in triples if shortest < len(triple[0].split()) <= longest]
        bleu = score([ours for *_, ours in own], [reference for _, reference, _ in own]).bleu if own else math.nan
        scores.append(bleu)
    return scores


def minutes_a_step(places) -> float:
    """Returns the minutes of a training step where nothing else runs: those of the fastest steps.

    Seeds that are trained together share them.
    """
    from transformer_flax.files import read_json_lines

    rate = "train/steps_per_second"
    lines = [line for place in places for line in read_json_lines(place.metrics_file) if rate in line]
    return 1 / 60 / max(line[rate] * line.get("train/seeds_at_once", 1) for line in lines)


def measure_speed(places) -> dict:
    """Measures how fast one run of each model translates the test split."""
    import transformer_flax
    from benchmarks.timing import interleaved

    restored = {name: transformer_flax.restore(place.path) for name, place in places.items()}
    sources = next(iter(restored.values())).split("test")[0]
    translators = {name: run.translator() for name, run in restored.items()}
    timings = interleaved({name: lambda t=t: t.translate(sources) for name, t in translators.items()}, REPEATS.value)
    return {name: timing.per_second(len(sources)) for name, timing in timings.items()}


def print_table(runs, minutes, speeds) -> None:
    from transformer_flax.ablation.statistics import mean

    print("| model | BLEU | seeds | parameters | training FLOPs | minutes | sentences a second |")
    print("|---|---|---|---|---|---|---|")
    for name, each in runs.items():
        bleu = mean([run.scores["test"]["bleu"] for run, _ in each])
        half = "" if bleu.interval is None else f" ± {bleu.interval[1] - bleu.value:.2f}"
        first = each[0][0]
        cells = [name, f"{bleu.value:.2f}{half}", len(each), f"{first.parameters:,}", f"{first.flops:.2e}"]
        print("| " + " | ".join(map(str, [*cells, f"{minutes[name] * first.steps:.1f}", speeds.get(name, "")])) + " |")


def print_lengths(lengths) -> None:
    shortest = [1, *(edge + 1 for edge in EDGES)]
    spans = [f"{first} to {last}" for first, last in zip(shortest, EDGES[:-1], strict=False)] + [f"{shortest[-2]} on"]
    print("\n| words of the source | " + " | ".join(spans) + " |\n" + "|---" * (len(EDGES) + 1) + "|")
    for name, each in lengths.items():
        print("| " + " | ".join([name, *(f"{bleu:.1f}" for bleu in means(each))]) + " |")


def means(rows) -> list[float]:
    return [sum(values) / len(values) for values in zip(*rows, strict=True)]


def draw(runs, minutes, lengths, folder: pathlib.Path) -> None:
    """BLEU over time and over length: means over seeds, and each seed as a faint line."""
    from matplotlib.figure import Figure

    time, length = Figure(figsize=(7, 4), layout="constrained"), Figure(figsize=(7, 4), layout="constrained")
    over_time, over_length = time.subplots(), length.subplots()
    for number, (name, each) in enumerate(runs.items()):
        curves = [
            ([minutes[name] * point["step"] for point in run.curve], [point["bleu"] for point in run.curve])
            for run, _ in each
        ]
        curves = [(x[:-1], y[:-1]) for x, y in curves]  # the last is of the whole split
        for axes, lines in (over_time, curves), (over_length, [(range(len(EDGES)), bleu) for bleu in lengths[name]]):
            for line in lines:
                axes.plot(*line, color=f"C{number}", linewidth=0.6, alpha=0.4)
            middle = [means(part) for part in zip(*lines, strict=True)]
            axes.plot(*middle, color=f"C{number}", marker=".", label=name)
            axes.grid(alpha=0.3)
    over_time.set(xlabel="minutes of training", ylabel="BLEU, validation, first sentences")
    over_length.set(xlabel="words of the source, at most", ylabel="BLEU, test", xticks=range(len(EDGES)))
    over_length.set_xticklabels([*map(str, EDGES[:-1]), "more"])
    folder.mkdir(parents=True, exist_ok=True)
    for figure, name in (time, "rivals_time.png"), (length, "rivals_length.png"):
        figure.axes[0].legend(fontsize=8)
        figure.savefig(folder / name, dpi=120)


if __name__ == "__main__":
    cli.run(main)
