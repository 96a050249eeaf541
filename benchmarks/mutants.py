"""Do the tests notice? One-line changes that break something, each in a copy of the source, and the tests that should fail for it.

    python benchmarks/mutants.py                 # the table below; what is known from an earlier run is not run again
    python benchmarks/mutants.py --list
    python benchmarks/mutants.py --only patience
    python benchmarks/mutants.py --random 40 --seed 1 --under training,runs,optim,lens

A mutant is killed if a named test fails, survives if all pass, and is stale if its old text is not in the file exactly once. With --random, changes
are made by rule (another comparison, + for -, a constant one off, a `not`, an `and`, a condition, a result or a call left out), and the tests of
their room are run. Results are kept in build/mutants.json by what was tested, so a run that was stopped goes on.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "build" / "mutants.json"
PASS = "pass"


@dataclass(frozen=True)
class Mutant:
    breaks: str  # in words; its name
    file: str  # below src/fedlens
    old: str  # once in the file
    new: str
    tests: str  # arguments of pytest: test files or node ids below tests/, and -k


# --- the table ----------------------------------------------------------------------------------------------------------

FED, CENTRAL, FOLDER, PRIVACY = "training/federated.py", "training/centralized.py", "runs/folder.py", "training/privacy.py"
SESSION, UPDATES, SERVER, ALGORITHMS = "runs/session.py", "training/updates.py", "optim/server.py", "training/algorithms.py"
WORK, SPARSE, STUDY, FILES = "engine/local_work.py", "optim/sparse_sgdm.py", "study/runner.py", "files.py"
R = "test_resume.py::test_"
SAID, COUNTING = (
    R + "what_a_checkpoint_says_is_said_by_the_next_one_and_by_the_summary",
    R + "a_federated_run_goes_on_counting_from_its_checkpoint",
)
FED_SAME, CENTRAL_SAME = R + "a_federated_run_that_is_resumed_is_the_run_itself", R + "a_centralised_run_that_is_resumed_is_the_run_itself"
FED_BEST, CENTRAL_BEST = (
    f"{R}a_{loop}_run_keeps_its_best_{unit}_and_stops_when_patience_is_over"
    for loop, unit in (("federated", "round"), ("centralised", "epoch"))
)
DRAWS, PLANS = (
    R + "no_two_batches_of_a_run_share_their_draws_and_equal_runs_share_all",
    R + "clients_steps_and_rounds_have_draws_of_their_own",
)
FLUSHED, LOSS = (
    R + "what_is_written_is_on_disk_before_it_has_its_name",
    R + "the_training_loss_of_an_epoch_has_what_was_before_the_checkpoint",
)

COUNTS = 'self.dropped, self.nonfinite, self.refused = (int(state[name]) for name in ("dropped", "nonfinite", "refused"))'
BYTES = 'traffic.up, traffic.down = traffic.up + int(state["bytes_up"]), traffic.down + int(state["bytes_down"])'
BETTER = "elif self.best_score is None or score > self.best_score:"
DROPOUT = 'keep.append(dropout_mask((steps, batch, features), dropout, torch_rng(seed, "dropout", round_, client)))'
KEYED = 'torch_rng(cfg.seed, "dropout", epoch, 0, within)'
AUGMENT = 'draws.append(draw((steps, batch), torch_rng(seed, "augment", round_, client)))'
EPOCH = "        training.loss_sum.zero_()  # before the checkpoint: the next epoch starts from zero\n        session.record(step + 1, line, evaluated=True, last=step + 1 == total)\n"
FINISH = "self._save_tensors(MODEL_FILE, model)\n        self.write(SUMMARY_FILE, to_json(summary))"
PASSED_OVER = 'falling back to the one before", which)\n            shutil.rmtree(checkpoint_folder(self.path, step))'

TABLE = [
    # a resumed run: what is not restored
    Mutant("resume loses the vectors of clients", UPDATES, "self.added = {int(client): vector.to(self.device) for client, vector in state.items()}", "self.added = {}", FED_SAME),
    Mutant("resume loses the server's momentum", SERVER, 'self.moments = {n.removeprefix("moment."): t.to(self.theta.device) for n, t in state.items() if n.startswith("moment.")}', "self.moments = {}", FED_SAME),
    Mutant("resume loses the controls of scaffold", ALGORITHMS, 'self.server = state.get("server")', "return", FED_SAME),
    Mutant("resume loses momentum, centralised", CENTRAL, 'self.optimizer.state[param]["momentum_buffer"] = buffer.to(param.device)', PASS, CENTRAL_SAME),
    Mutant("resume loses patience's counter", SESSION, 'float(own["seconds"]), int(own["stale"])', 'float(own["seconds"]), 0', SAID),
    Mutant("resume loses the seconds", SESSION, 'float(own["seconds"]), int(own["stale"])', '0.0, int(own["stale"])', SAID),
    Mutant("resume loses the facts of head and mask", SESSION, 'dict(own["facts"])', '{**own["facts"], "ridge": None}', SAID),
    Mutant("resume loses the best score", SESSION, 'own["best_score"], own["best_step"]', 'None, own["best_step"]', SAID),
    Mutant("resume loses the best step", SESSION, 'own["best_score"], own["best_step"]', 'own["best_score"], None', SAID),
    Mutant("resume loses the count of dropped", UPDATES, COUNTS, COUNTS + "; self.dropped = 0", COUNTING),
    Mutant("resume loses the count of refused", UPDATES, COUNTS, COUNTS + "; self.refused = 0", COUNTING),
    Mutant("resume loses the count of updates that are not finite", UPDATES, COUNTS, COUNTS + "; self.nonfinite = 0", COUNTING),
    Mutant("resume loses the bytes up", UPDATES, BYTES, 'traffic.down += int(state["bytes_down"])', COUNTING),
    Mutant("resume loses the bytes down", UPDATES, BYTES, 'traffic.up += int(state["bytes_up"])', COUNTING),
    Mutant("resume loses the running training loss", CENTRAL, 'self.loss_sum.fill_(state["loss_sum"])', PASS, LOSS),
    Mutant("an epoch's loss is zeroed after its checkpoint", CENTRAL, EPOCH, "\n".join(EPOCH.split("\n")[1::-1]) + "\n", LOSS),
    Mutant("epsilon forgets the rounds before a resume", PRIVACY, "self.begin_round(training_cohort(self.config, round_) if self.on else [])", PASS, R + "epsilon_counts_the_rounds_before_a_resume"),
    Mutant("the secret is drawn anew on a resume", FOLDER, "if not digests.written(self.path, SECRET_FILE):", "if True:", R + "the_secret_is_drawn_once_and_only_its_owner_reads_it"),
    # the best and the last
    Mutant("the last model meets the test set, federated", FED, 'facts, "server", "ledger", write=', 'facts, "ledger", write=', FED_BEST),
    Mutant("the last model meets the test set, centralised", CENTRAL, 'bench.description(space), "training")', "bench.description(space))", CENTRAL_BEST),
    Mutant("vectors of the last round go with the best model", FED, 'facts, "server", "ledger", write=', 'facts, "server", write=', FED_BEST),
    Mutant("of equal scores the later wins, federated", SESSION, BETTER, BETTER.replace(">", ">="), FED_BEST),
    Mutant("of equal scores the later wins, centralised", SESSION, BETTER, BETTER.replace(">", ">="), CENTRAL_BEST),
    Mutant("patience is one too long, federated", SESSION, "self.stale >= patience", "self.stale > patience", FED_BEST),
    Mutant("patience is one too short, federated", SESSION, "self.stale >= patience", "self.stale >= patience - 1", FED_BEST),
    Mutant("patience is one too long, centralised", SESSION, "self.stale >= patience", "self.stale > patience", CENTRAL_BEST),
    Mutant("patience is one too short, centralised", SESSION, "self.stale >= patience", "self.stale >= patience - 1", CENTRAL_BEST),
    Mutant("a loss that is no number chooses alpha", FED, "nan=np.inf", "nan=-np.inf", R + "the_first_of_the_lowest_losses_chooses_alpha_and_no_number_never_does"),
    Mutant("of equal losses the last chooses alpha", FED, "c.alphas[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))]", "c.alphas[::-1][int(np.argmin(np.nan_to_num(losses[::-1], nan=np.inf)))]", R + "the_first_of_the_lowest_losses_chooses_alpha_and_no_number_never_does"),
    # an update's number of steps
    Mutant("steps are lost where an update is copied", WORK, "return replace(self, delta=self.delta.clone())", "return replace(self, delta=self.delta.clone(), steps=1)", R + "controls_of_scaffold_are_divided_by_each_client_s_own_steps"),
    Mutant("steps are lost where rows are merged", UPDATES, "Received(update.client, update.samples, update.steps,", "Received(update.client, update.samples, 1,", R + "fednova_divides_each_update_by_its_steps_under_any_merge_rule"),
    Mutant("steps are lost between ranks", "engine/ranks.py", "Update(client, samples, steps, row,", "Update(client, samples, 1, row,", R + "an_update_that_other_ranks_send_has_its_own_numbers"),
    # draws
    Mutant("dropout is the same in every step, centralised", CENTRAL, KEYED, KEYED.replace("within", "0"), DRAWS),
    Mutant("dropout is the same in every epoch, centralised", CENTRAL, KEYED, KEYED.replace("epoch", "0"), DRAWS),
    Mutant("augmentation is the same in every step, centralised", CENTRAL, "select(self._draws, within)", "select(self._draws, 0)", DRAWS),
    Mutant("augmentation is the same in every epoch, centralised", CENTRAL, '"augment", epoch, 0)', '"augment", 0, 0)', DRAWS),
    Mutant("batches are the same in every epoch, centralised", CENTRAL, '"batches", epoch, 0)', '"batches", 0, 0)', DRAWS),
    Mutant("dropout is the same in every step, federated", WORK, DROPOUT, DROPOUT[:-1].replace("(steps,", "(1,") + ".expand(steps, -1, -1))", PLANS),
    Mutant("dropout is the same in every round, federated", WORK, DROPOUT, DROPOUT.replace("round_", "0"), PLANS),
    Mutant("dropout is the same for every client", WORK, DROPOUT, DROPOUT.replace("client", "0"), PLANS),
    Mutant("augmentation is the same in every step, federated", WORK, AUGMENT, AUGMENT[:-1].replace("draws.append(", "draws.append({n: x[:1].expand_as(x) for n, x in ") + ".items()})", PLANS),
    Mutant("augmentation is the same in every round, federated", WORK, AUGMENT, AUGMENT.replace("round_", "0"), PLANS),
    Mutant("augmentation is the same for every client", WORK, AUGMENT, AUGMENT.replace("client", "0"), PLANS),
    Mutant("batches are the same in every round, federated", WORK, '"batches", round_, client)', '"batches", 0, client)', PLANS),
    # noise
    Mutant("the noise's key lacks the round", PRIVACY, ":{round_}:{answers}", ":{answers}", R + "the_same_sum_has_another_noise_in_another_round_and_it_is_divided_by_those_who_were_asked"),
    Mutant("the noise's key lacks the secret", PRIVACY, "privacy:{self._secret}:", "privacy:", R + "the_same_sum_has_another_noise_in_another_round_and_it_is_divided_by_those_who_were_asked"),
    Mutant("the noise tells how many answered", FED, "privacy.release(d, arrived.count, len(present), t)", "privacy.release(d, arrived.count, max(1, arrived.count), t)", R + "noise_is_not_less_hidden_where_some_updates_are_refused"),
    Mutant("under noise updates weigh by samples", PRIVACY, "return 1.0 if self.on else float(samples)", "return float(samples)", R + "under_noise_all_updates_weigh_alike"),
    # files
    Mutant("the summary is written before the model", FOLDER, FINISH, "\n        ".join(FINISH.split("\n        ")[::-1]), R + "a_run_that_is_killed_before_its_summary_is_not_finished_and_ends_with_the_same_model"),
    Mutant("a damaged checkpoint stays", FOLDER, PASSED_OVER, PASSED_OVER.split("\n")[0], R + "a_damaged_checkpoint_that_is_passed_over_is_removed"),
    Mutant("a half-written checkpoint stays", FILES, "shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)", PASS, R + "a_checkpoint_that_a_kill_left_half_written_is_removed_when_the_run_goes_on"),
    Mutant("small files are not flushed", FILES, "fsync(part)", PASS, FLUSHED),
    Mutant("metrics are not flushed", FOLDER, "os.fsync(file.fileno())", PASS, FLUSHED),
    Mutant("a checkpoint is not flushed", FOLDER, "                    fsync(file)", "                    pass", FLUSHED),
    Mutant("a checkpoint's state is not flushed", FOLDER, "                    fsync(file)", '                    file.suffix == ".json" or fsync(file)', FLUSHED),
    Mutant("the folder of checkpoints is not flushed", FOLDER, "fsync(self.checkpoints)", PASS, FLUSHED),
    # smaller things
    Mutant("the clipped mean bounds by the mean of the norms", "lens/merging.py", "norms.median()", "norms.mean()", R + "the_clipped_mean_bounds_by_the_median_of_the_norms"),
    Mutant("a coordinate at a border counts to the tensor before", "lens/space.py", "torch.searchsorted(self.active, ends)", "torch.searchsorted(self.active, ends, right=True)", R + "a_coordinate_at_a_tensor_s_border_counts_to_its_own_tensor"),
    Mutant("a copied optimizer forgets what it has paused", SPARSE, '"_paused": self._paused}', '"_paused": set()}', R + "a_copied_optimizer_knows_which_tensors_it_has_paused"),
    Mutant("what does not train is not kept in the study", STUDY, '"unfit": self.failed_trials,', '"unfit": {},', R + "a_value_that_does_not_train_is_kept_in_the_study_and_not_tried_again"),
    Mutant("what does not train is not read from the study", STUDY, 'before.get("unfit", {})', "{}", R + "a_value_that_does_not_train_is_kept_in_the_study_and_not_tried_again"),
    Mutant("a table's aim is that of its worst cell", "study/results.py", "NEAR * max(means)", "NEAR * min(means)", R + "rounds_and_bytes_are_counted_to_what_the_best_cell_reaches"),
]  # fmt: skip

ROOMS = {  # of --random: which tests look at a room, the quickest first
    "training": "test_resume.py test_centralized.py test_runs.py test_federated.py test_sparse_training.py",
    "runs": "test_runs.py test_resume.py",
    "engine": "test_federated.py test_resume.py test_federation.py",
    "optim": "test_sparse_sgdm.py test_federated.py test_centralized.py test_resume.py",
    "lens": "test_merging.py test_masks.py test_task_vectors.py test_sensitivity.py test_editing.py test_resume.py test_federated.py",
    "models": "test_vit.py test_heads.py test_weights.py test_centralized.py",
    "data": "test_batches.py test_partition.py test_data_sources.py test_resume.py",
    "study": "test_statistics.py test_study.py test_report_files.py test_report_html.py test_resume.py",
}
SLOW = "not killed_twenty and not gloo and not ranks_that_come_late"


# --- changes by rule ----------------------------------------------------------------------------------------------------

SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not", "not in": "in", "in": "not in", "+": "-", "-": "+", "and": "or", "or": "and"}  # fmt: skip


@dataclass(frozen=True)
class Change:
    line: int  # from 0
    start: int  # bytes
    end: int
    new: str
    kind: str


def changes(tree: ast.AST, lines: Sequence[bytes]) -> Iterator[Change]:
    """Every change within one line that a rule makes of this file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):  # what is inside does not know its place before Python 3.12
            for each in ast.walk(node):
                each.skipped = True  # type: ignore[attr-defined]
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):  # no code that runs for its result
                for inner in value if isinstance(value, list) else [value]:
                    for each in ast.walk(inner) if isinstance(inner, ast.AST) else ():
                        each.skipped = True  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if getattr(node, "skipped", False) or (
            getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1) and not isinstance(node, ast.If)
        ):
            continue
        yield from _of(node, lines)


def _between(a: ast.expr, b: ast.expr, lines: Sequence[bytes], kind: str) -> Iterator[Change]:
    """The operator between two operands, another one in its place."""
    assert a.end_col_offset is not None
    if a.end_lineno != b.lineno:
        return
    text = lines[b.lineno - 1][a.end_col_offset : b.col_offset].decode()
    found = re.search(r"is not|not in|[<>=!]=|[<>+\-]|\b(is|in|and|or)\b", text)
    if found:
        start = a.end_col_offset + len(text[: found.start()].encode())
        yield Change(b.lineno - 1, start, start + len(found[0]), SWAPS[found[0]], kind)


def _of(node: ast.AST, lines: Sequence[bytes]) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        yield from _between(node.left, node.comparators[0], lines, "comparison")
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield from _between(node.left, node.right, lines, "sign")
    elif isinstance(node, ast.BoolOp):
        yield from _between(node.values[0], node.values[1], lines, "and/or")
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield _whole(node, str(node.value + 1), "constant")
        yield _whole(node, f"({node.value - 1})", "constant")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Change(node.lineno - 1, node.col_offset, node.col_offset + len("not "), "", "not")
    elif isinstance(node, ast.If | ast.IfExp) and node.test.lineno == node.test.end_lineno:
        where, text = node.test, ast.unparse(node.test)
        if text not in ("TYPE_CHECKING", "__name__ == '__main__'"):
            yield _whole(where, f"(not ({_text(where, lines)}))", "condition")
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield _whole(node, "return None", "result")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not ast.unparse(node).startswith(("log.", "warnings.")):
        yield _whole(node, "pass", "call")


def _whole(node: ast.expr | ast.stmt, new: str, kind: str) -> Change:
    assert node.end_col_offset is not None
    return Change(node.lineno - 1, node.col_offset, node.end_col_offset, new, kind)


def _text(node: ast.expr, lines: Sequence[bytes]) -> str:
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def at_random(count: int, seed: int, rooms: Sequence[str]) -> Iterator[tuple[Mutant, str]]:
    """Mutants and the files that they make. Each change that is possible is as likely as any other."""
    possible: list[tuple[str, Path, Change]] = []
    for room in rooms:
        for file in sorted((ROOT / "src" / "fedlens" / room).rglob("*.py")):
            lines = file.read_bytes().split(b"\n")
            possible += [(room, file, change) for change in changes(ast.parse(file.read_bytes()), lines)]
    for room, file, change in random.Random(seed).sample(possible, min(count, len(possible))):
        lines = file.read_bytes().split(b"\n")
        before = lines[change.line]
        lines[change.line] = before[: change.start] + change.new.encode() + before[change.end :]
        place, old, new = (
            file.relative_to(ROOT / "src" / "fedlens").as_posix(),
            before.decode().strip(),
            lines[change.line].decode().strip(),
        )
        mutant = Mutant(f"{place}:{change.line + 1} {change.kind}: {old}  ->  {new}", place, old, new, f"{ROOMS[room]} -k '{SLOW}'")
        yield mutant, b"\n".join(lines).decode()


# --- running ------------------------------------------------------------------------------------------------------------


def arguments_of(tests: str) -> list[str]:
    words = shlex.split(tests)
    return [f"tests/{word}" if word.startswith("test_") else word for word in words]


class Runner:
    def __init__(self, folder: Path, limit: float) -> None:
        self.limit = limit
        self.source = folder / "src"
        shutil.copytree(ROOT / "src", self.source, ignore=shutil.ignore_patterns("__pycache__"))
        self.known: dict[str, list[str]] = json.loads(KNOWN.read_text()) if KNOWN.is_file() else {}
        self.environment = {**os.environ, "PYTHONPATH": str(self.source), "PYTHONDONTWRITEBYTECODE": "1"}
        self.code = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(self.source.rglob("*.py")))).hexdigest()
        images = folder / "images"  # made once, not by every pytest
        keep = "import sys, shutil, conftest; shutil.copytree(conftest.SMALL_DATA, sys.argv[1])"
        subprocess.run([sys.executable, "-c", keep, str(images)], cwd=ROOT / "tests", env=self.environment, check=True)
        self.environment["FEDLENS_TESTS_SMALL"] = str(images)
        used = subprocess.run([sys.executable, "-c", "import fedlens; print(fedlens.__file__)"], env=self.environment, capture_output=True, text=True, check=True)  # fmt: skip
        if not used.stdout.startswith(str(self.source)):
            sys.exit(f"not the copy but {used.stdout.strip()} would be tested")

    def result(self, file: str, content: str | None, tests: str) -> tuple[str, str]:
        """(killed | survived | broken | slow, the test that failed). `content` None: the source as it is."""
        arguments = arguments_of(tests)
        texts = [
            (ROOT / "tests" / "conftest.py").read_text(),
            *((ROOT / a.split("::")[0]).read_text() for a in arguments if a.startswith("tests/")),
        ]
        key = hashlib.sha256("\0".join([self.code, file, content or "", *arguments, *texts]).encode()).hexdigest()[:24]
        if key not in self.known:
            place = self.source / "fedlens" / file
            before = place.read_text() if content is not None else ""
            try:
                if content is not None:
                    place.write_text(content)
                self.known[key] = list(self._tested(arguments))
            finally:
                if content is not None:
                    place.write_text(before)
            KNOWN.parent.mkdir(exist_ok=True)
            there = json.loads(KNOWN.read_text()) if KNOWN.is_file() else {}  # another process may have found more
            part = KNOWN.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps({**there, **self.known}))
            part.replace(KNOWN)
        outcome, killer = self.known[key]
        return outcome, killer

    def _tested(self, arguments: Sequence[str]) -> tuple[str, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
        try:
            done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=self.limit, check=False)
        except subprocess.TimeoutExpired:
            return "slow", f"more than {self.limit:g} s"
        if done.returncode == 0:
            return "survived", ""
        found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if found:
            return "killed", found[1]
        if "ImportError while loading conftest" in done.stderr + done.stdout or re.search(r"^ERROR tests/", done.stdout, re.MULTILINE):
            return "killed", "(it cannot be imported)"
        return "broken", (done.stdout + done.stderr)[-500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name, file or tests have this in them")
    parser.add_argument("--list", action="store_true", help="say which there are, and run nothing")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N changes by rule instead of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="training,runs,optim,lens", help="rooms of --random: folders of src/fedlens")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of one mutant")
    parser.add_argument("--anew", action="store_true", help="forget what earlier runs found")
    options = parser.parse_args()
    if options.anew:
        KNOWN.unlink(missing_ok=True)
    todo: list[tuple[Mutant, str | None]] = []
    if options.random:
        rooms = options.under.split(",")
        if wrong := [room for room in rooms if room not in ROOMS]:
            parser.error(f"--under: {wrong[0]!r} given, allowed are {', '.join(ROOMS)}")
        todo += at_random(options.random, options.seed, rooms)
    else:
        for mutant in TABLE:
            text = (ROOT / "src" / "fedlens" / mutant.file).read_text()
            todo.append((mutant, text.replace(mutant.old, mutant.new) if text.count(mutant.old) == 1 else None))
    todo = [(m, content) for m, content in todo if options.only in f"{m.breaks} {m.file} {m.tests}"]
    if options.list:
        for mutant, content in todo:
            print(f"{'stale   ' if content is None else ''}{mutant.breaks}  [{mutant.file}; {mutant.tests}]")
        return 0
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="fedlens-mutants-") as folder:
        runner = Runner(Path(folder), options.limit)
        asked = list(dict.fromkeys(mutant.tests for mutant, content in todo if content is not None))
        for tests in asked if options.random else [" ".join(asked)]:
            outcome, why = runner.result("", None, tests)
            if outcome != "survived":
                sys.exit(f"{tests}: fails without any mutant: {why}")
        for number, (mutant, content) in enumerate(todo, 1):
            began = time.monotonic()
            outcome, why = (
                ("stale", "its old text is not there exactly once")
                if content is None
                else runner.result(mutant.file, content, mutant.tests)
            )
            counts[outcome] = counts.get(outcome, 0) + 1
            print(
                f"{number}/{len(todo)} {outcome:8} {mutant.breaks}  {f'<- {why}' if why else ''} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if options.random:
        print(f"score: {(counts.get('killed', 0) + counts.get('slow', 0)) / max(1, len(todo)):.0%} of {len(todo)}")
    return 0 if options.random else int(set(counts) != {"killed"})


if __name__ == "__main__":
    sys.exit(main())
