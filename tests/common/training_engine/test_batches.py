"""What people train beside images with one label: batches, losses, metrics and loaders of any kind.

References are plain loops in one process, never the engine.
"""

import dataclasses
import math
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from common.checkpoint import load_checkpoint
from common.distributed.process_group import current_world
from common.errors import GroupError, UserError
from common.training_engine import TrainingEngine, distributed_train_worker, validate
from common.training_engine.batches import own_sizes, to_device
from common.training_engine.checkpoint_manager import CheckpointManager, SavePolicy
from common.utils.hashing import digest
from lab.proofs.equivalence import parameter_errors
from tests.helpers import run_ranks
from tests.helpers.engines import prepared, sgd

CLASSES = 5
IGNORED = -1


class Tagger(nn.Module):
    """A class for each token: (samples, length) to (samples, classes, length)."""

    def __init__(self, seed=100):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, CLASSES)
        self.double()

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embedding(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(2)
        return self.head(hidden).transpose(1, 2)


def sentences(samples, length, seed, *, ignored=0):
    """Return tokens and labels, both (samples, length); the last ``ignored`` do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 7, (samples, length), generator=generator)
    labels = torch.randint(0, CLASSES, (samples, length), generator=generator)
    labels[:, length - ignored :] = IGNORED
    return tokens, labels


def right_tokens(outputs, batch):
    """Return how many tokens are right, and how many there are."""
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    kept = labels != IGNORED
    return ((outputs.argmax(1) == labels) & kept).sum(), kept.sum()


def trained(folder, model, train, val, criterion, *, epochs=2, lr=0.1, **options):
    engine = TrainingEngine(model, "cpu", output_dir=folder, experiment_name="run")
    return engine.train(train, val, sgd(model, lr), criterion, num_epochs=epochs, **options)


# --- metrics ---


def test_the_accuracy_of_tokens_is_unknown_until_it_is_given(tmp_path):
    batches = [sentences(4, 6, seed, ignored=seed) for seed in range(3)]
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORED)
    with pytest.raises(UserError, match=r"target_accuracy needs an accuracy.*give metrics="):
        trained(tmp_path, Tagger(), batches, batches, criterion, target_accuracy=0.9)
    model = Tagger()
    history = trained(
        tmp_path,
        model,
        batches,
        batches,
        criterion,
        target_accuracy=0.01,
        patience=2,
        epochs=5,
        metrics={"accuracy": right_tokens},
    )
    assert all(map(math.isnan, history["train_accuracy"]))
    assert history["epoch"] == [1, 2], "the target is reached twice"
    found = [right_tokens(model(batch[0]), batch) for batch in batches]
    expected = sum(int(right) for right, _ in found) / sum(int(count) for _, count in found)
    assert history["val_accuracy"][-1] == pytest.approx(expected, rel=1e-12)
    assert 0 < expected < 1


class Shifting:
    """A validation set whose targets, of shape (8, 1) or (8,), lie ``apart[n]`` off in epoch n."""

    def __init__(self, model, shape, apart):
        self.model, self.shape, self.apart = model, shape, iter(apart)

    def __iter__(self):
        inputs = torch.arange(8.0).unsqueeze(1)
        with torch.no_grad():
            yield inputs, self.model(inputs).reshape(self.shape) + next(self.apart)


@pytest.mark.parametrize("shape", [(8, 1), (8,)])
def test_without_a_metric_the_epoch_of_the_lowest_validation_loss_is_the_best(tmp_path, shape):
    layers = [nn.Linear(1, 1), nn.Unflatten(0, (-1,)) if len(shape) == 2 else nn.Flatten(0)]
    model = nn.Sequential(*layers)
    history = trained(
        tmp_path,
        model,
        [(torch.randn(8, 1), torch.randn(shape))],
        Shifting(model, shape, [3.0, 1.0, 2.0]),
        nn.MSELoss(),
        epochs=3,
        lr=0.001,
    )
    assert history["val_loss"] == pytest.approx([9, 1, 4])
    assert all(map(math.isnan, history["val_accuracy"]))
    assert load_checkpoint(tmp_path / "run/best.pt")["epoch"] == 2


class Scripted:
    """A metric whose values are given; a lower one is better."""

    higher_is_better = False

    def __init__(self, values):
        self.values = iter(values)
        self.calls = []

    def reset(self):
        self.calls.append("reset")

    def update(self, outputs, targets):
        self.calls.append((tuple(outputs.shape), tuple(targets.shape)))

    def compute(self):
        return torch.tensor(next(self.values))


def test_the_first_metric_decides_which_epoch_is_the_best(tmp_path):
    inputs = torch.randn(6, 4)
    batches = [(inputs, torch.randint(0, 2, (6, 3)).float())]  # several labels each
    first = Scripted([5.0, 3.0, 4.0])
    history = trained(
        tmp_path,
        nn.Linear(4, 3),
        batches,
        batches,
        nn.BCEWithLogitsLoss(),
        epochs=3,
        metrics={"error": first, "other": lambda outputs, batch: (1.0, 2)},
    )
    assert history["val_error"] == [5, 3, 4]
    assert history["val_other"] == [0.5, 0.5, 0.5]
    assert load_checkpoint(tmp_path / "run/best.pt")["epoch"] == 2
    assert first.calls == ["reset", ((6, 3), (6, 3))] * 3


# --- batches ---


@dataclasses.dataclass(frozen=True)
class Sentence:
    tokens: torch.Tensor
    labels: torch.Tensor
    name: str = "a sentence"


class OwnLoss(nn.Module):
    """A model that returns its loss, as those of the transformers library do."""

    def __init__(self):
        super().__init__()
        self.tagger = Tagger()

    def forward(self, input_ids, labels):
        logits = self.tagger(input_ids)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def counted_step(model, batch):
    outputs = model(**batch)
    return outputs["loss"], outputs, (batch["labels"] != IGNORED).sum()


def own_step(model, batch):
    outputs = model(batch.tokens)
    return nn.functional.cross_entropy(outputs, batch.labels), outputs


def test_dicts_tuples_and_dataclasses_train_as_a_plain_loop_does(tmp_path):
    tokens, labels = sentences(4, 6, 0)
    mask = torch.ones_like(tokens)
    reference = Tagger()
    optimizer = sgd(reference, 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(tokens), labels).backward()
        optimizer.step()
    entropy = nn.CrossEntropyLoss()
    cases = [
        (Tagger(), {"input_ids": tokens, "labels": labels}, entropy, {}),
        (Tagger(), ({"input_ids": tokens, "attention_mask": mask}, labels), entropy, {}),
        (Tagger(), ((tokens, mask), labels), entropy, {}),
        (OwnLoss(), {"input_ids": tokens, "labels": labels}, None, {"forward_step": counted_step}),
        (Tagger(), Sentence(tokens, labels), None, {"forward_step": own_step}),
    ]
    for model, batch, criterion, options in cases:
        history = trained(tmp_path, model, [batch], [batch], criterion, **options)
        tagger = getattr(model, "tagger", model)
        assert max(parameter_errors(tagger, reference).values()) < 1e-12, type(batch)
        assert history["val_loss"][-1] == pytest.approx(
            nn.functional.cross_entropy(reference(tokens), labels).item(), rel=1e-12
        )


@pytest.mark.parametrize(
    ("batch", "criterion", "words"),
    [
        ("a line of text", nn.CrossEntropyLoss(), "yielded a str without tensors.*must yield"),
        ((torch.ones(2, 4), torch.ones(2), torch.ones(2)), nn.MSELoss(), "yielded a tuple.*must"),
        ((torch.ones(2, 4), torch.ones(2)), None, "need a criterion"),
        ({"input": torch.ones(2, 4)}, None, "must return its loss.*returned a Tensor"),
        (
            {"input": torch.ones(2, 4), "labels": torch.ones(2, 3, dtype=torch.int64)},
            None,
            r"labels of shape \(2, 3\) and a model's own loss.*forward_step",
        ),
        ((torch.ones(1, 4), torch.ones(1, 4)), nn.MSELoss(), "batch of one sample.*drop_last"),
    ],
)
def test_a_batch_that_cannot_be_says_what_to_do(tmp_path, batch, criterion, words):
    with pytest.raises(UserError, match=words):
        trained(tmp_path, nn.BatchNorm1d(4), [batch], None, criterion)


class Judge(nn.Module):
    """A model that returns the loss of one label a sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3).double()

    def forward(self, values, labels):
        return {"loss": nn.functional.cross_entropy(self.head(values), labels)}


def test_a_model_s_own_loss_is_a_mean_over_samples(tmp_path):
    values, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    batches = [
        {"values": values[:4], "labels": labels[:4]},
        {"values": values[4:], "labels": labels[4:]},
    ]
    model = Judge()
    history = trained(tmp_path, model, batches, batches, None, lr=0.0)
    loss = model(values, labels)["loss"].item()
    assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-12)


def test_a_metric_that_is_no_number_makes_no_epoch_the_best_and_says_so(tmp_path):
    batch = (torch.ones(2, 4), torch.ones(2, 4))
    metrics = {"none": lambda outputs, batch: (0.0, 0)}
    with pytest.warns(UserWarning, match="the first metric is not a number"):
        trained(tmp_path, nn.Linear(4, 4), [batch], [batch], nn.MSELoss(), metrics=metrics)
    assert not (tmp_path / "run/best.pt").exists()


def test_a_metric_of_a_collection_may_not_hide_another(tmp_path):
    f1 = torchmetrics.F1Score("multiclass", num_classes=4)
    batch = (torch.ones(2, 4), torch.tensor([0, 1]))
    metrics = {"f1": right_tokens, "all": torchmetrics.MetricCollection({"f1": f1})}
    with pytest.raises(UserError, match=r"two metrics are called 'f1'.*prefix"):
        trained(tmp_path, nn.Linear(4, 4), [batch], [batch], nn.CrossEntropyLoss(), metrics=metrics)
    metrics["all"] = torchmetrics.MetricCollection({"f1": f1}, prefix="all_")
    metrics["f1"] = lambda outputs, batch: (torch.tensor(0.1, dtype=torch.float64), 3)
    history = trained(
        tmp_path, nn.Linear(4, 4), [batch], [batch], nn.CrossEntropyLoss(), metrics=metrics
    )
    assert set(history) >= {"val_f1", "val_all_f1"}
    assert history["val_f1"][-1] == 0.1 / 3, "in float64"


def test_a_metric_without_a_count_is_refused(tmp_path):
    batch = (torch.ones(2, 4), torch.ones(2, 4))
    metrics = {"half": lambda outputs, batch: 0.5}
    with pytest.raises(UserError, match=r"'half' returned 0\.5: return total, count"):
        trained(tmp_path, nn.Linear(4, 4), [batch], [batch], nn.MSELoss(), metrics=metrics)


def mean_of_nothing(outputs, targets):
    return outputs.sum() * math.nan, 0


@pytest.mark.parametrize(
    "criterion",
    [mean_of_nothing, nn.CrossEntropyLoss(ignore_index=IGNORED)],
    ids=["own", "torch's"],
)
def test_a_step_in_which_no_target_counts_is_named(tmp_path, criterion):
    batches = [sentences(4, 6, 0), sentences(4, 6, 1, ignored=6)]
    if criterion is mean_of_nothing:
        batches = batches[1:]
    words = f"no target counts in epoch 1, step {len(batches)}, on any rank"
    with pytest.raises(GroupError, match=words):
        trained(tmp_path, Tagger(), batches, None, criterion)
    scores = validate(Tagger(), current_world(), criterion, batches[-1:])
    assert math.isnan(scores.loss)


def test_a_sample_whose_only_label_is_ignored_by_default_is_refused(tmp_path):
    inputs, labels = torch.randn(4, 4), torch.tensor([0, 1, -100, 2])
    default, chosen = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=IGNORED)
    for loaders in ([(inputs, labels)], None), ([(inputs, labels.abs() % 3)], [(inputs, labels)]):
        with pytest.raises(
            UserError, match=r"a label is -100.*CrossEntropyLoss\(ignore_index=-1\)"
        ):
            trained(tmp_path, nn.Linear(4, 3), *loaders, default)
    model = nn.Linear(4, 3)
    kept = labels >= 0
    losses = trained(
        tmp_path, model, [(inputs, labels.clamp(min=IGNORED))], None, chosen, epochs=1, lr=0.0
    )["train_loss"]
    assert losses == [pytest.approx(default(model(inputs[kept]), labels[kept]).item(), rel=1e-6)]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_criterion_that_returns_a_sum_over_samples_warns(tmp_path, reduction, recwarn):
    def criterion(outputs, targets):
        return nn.functional.mse_loss(outputs, targets, reduction=reduction)

    batch = (torch.randn(6, 4), torch.randn(6, 4))
    trained(tmp_path, nn.Linear(4, 4), [batch], None, criterion)
    sums = [one for one in recwarn if "doubles when each sample comes twice" in str(one.message)]
    assert len(sums) == (reduction == "sum")


def test_a_loss_over_tokens_without_a_count_warns(tmp_path):
    criterion = nn.functional.cross_entropy  # of which nobody knows what it averages over
    with pytest.warns(UserWarning, match="counts as a mean over samples.*return loss, count"):
        trained(tmp_path, Tagger(), [sentences(4, 6, 0)], None, criterion)


class Alternating(BatchSampler):
    """Batches of one sample and of three, in turns."""

    def __iter__(self):
        return iter([[0], [1, 2, 3], [4]])


def test_the_sizes_of_batches_are_known_only_where_the_sampler_tells():
    data = TensorDataset(torch.arange(10))
    assert own_sizes(DataLoader(data, batch_size=4)) == [4, 4, 2]
    assert own_sizes(DataLoader(data, batch_size=4, drop_last=True)) == [4, 4]
    own = Alternating(data, 4, drop_last=False)
    assert own_sizes(DataLoader(data, batch_sampler=own)) is None
    assert own_sizes(DataLoader(Stream(10), batch_size=4)) is None


def test_images_get_the_strides_that_convolutions_want():
    images, labels = to_device((torch.rand(2, 3, 4, 4), torch.zeros(2)), "cpu")
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.shape == (2,)


# --- losses that count ---


class MeanOverTokens(nn.Module):
    """A criterion that says what it is a mean over."""

    def forward(self, outputs, labels):
        kept = labels != IGNORED
        losses = nn.functional.cross_entropy(
            outputs, labels, ignore_index=IGNORED, reduction="none"
        )
        return losses.sum() / kept.sum().clamp(min=1), kept.sum()


# Samples, length and ignored labels of each micro-batch, by rank: 32 tokens beside 2, none that
# counts on rank 1, other numbers of samples, and a last batch that is short.
TOKENS = [
    [(4, 32, 0), (4, 6, 2), (4, 5, 1), (4, 8, 0), (3, 9, 1), (1, 4, 1)],
    [(4, 2, 0), (4, 3, 3), (2, 9, 0), (4, 3, 0), (1, 2, 0), (2, 3, 2)],
    [(4, 9, 8), (4, 6, 5), (4, 2, 0), (4, 7, 0), (3, 3, 0), (3, 2, 0)],
]
WEIGHT = torch.linspace(0.2, 2, CLASSES, dtype=torch.float64)
CRITERIA = {
    "torch's": nn.CrossEntropyLoss(ignore_index=IGNORED),
    "weighted": nn.CrossEntropyLoss(WEIGHT, ignore_index=IGNORED),
    "own": MeanOverTokens(),
}


def of_rank(rank):
    return [
        sentences(samples, length, 10 * rank + step, ignored=ignored)
        for step, (samples, length, ignored) in enumerate(TOKENS[rank])
    ]


def mean_over_all_tokens(batches, weight):
    """Return a function of the model: the mean loss over the tokens of all batches."""

    def loss(model):
        outputs = [model(tokens).transpose(1, 2).reshape(-1, CLASSES) for tokens, _ in batches]
        labels = torch.cat([labels.flatten() for _, labels in batches])
        return nn.functional.cross_entropy(
            torch.cat(outputs), labels, weight=weight, ignore_index=IGNORED
        )

    return loss


def in_one_process(size, accumulation_steps, weight):
    model = Tagger()
    optimizer = sgd(model, 0.5)
    losses = []
    for begin in range(0, 6, accumulation_steps):
        together = [
            batch for rank in range(size) for batch in of_rank(rank)[begin:][:accumulation_steps]
        ]
        optimizer.zero_grad()
        loss = mean_over_all_tokens(together, weight)(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train_tokens(rank, size):
    found = {}
    for name, criterion in CRITERIA.items():
        for sync in ("ddp", "all_reduce") if size > 1 else (None,):
            for steps in (1, 2):
                model, records = Tagger(100 + rank), []
                engine = prepared(
                    model,
                    sync,
                    optimizer=sgd(model, 0.5),
                    criterion=criterion,
                    accumulation_steps=steps,
                )
                if size == 1:
                    model.load_state_dict(Tagger().state_dict())
                engine.train_epoch(of_rank(rank), epoch=1, on_steps=records.extend)
                engine.close()
                reference, losses = in_one_process(size, steps, getattr(criterion, "weight", None))
                error = max(parameter_errors(model, reference).values())
                same_losses = [one.loss for one in records] == pytest.approx(losses, rel=1e-12)
                found[name, sync, steps] = (error, same_losses, digest(model.state_dict()))
    return found


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_mean_over_tokens_equals_one_process_on_all_of_them(size):
    results = run_ranks(size, train_tokens, size)
    assert len(results[0]) == 12 if size > 1 else 6
    for case, (error, same_losses, weights) in results[0].items():
        assert error < 1e-12, case
        assert same_losses, case
        assert all(result[case][2] == weights for result in results), case


# --- loaders without a length, metrics over ranks, unused parameters ---


class Stream(IterableDataset):
    def __init__(self, samples, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, 4, generator=generator)
        self.labels = torch.randint(0, 3, (samples,), generator=generator)

    def __iter__(self):
        return zip(self.inputs, self.labels, strict=True)


class SlowList:
    """A loader of batches that each take a while, of a length that tells nothing of their sizes."""

    def __init__(self, batches, seconds):
        self.batches, self.seconds = batches, seconds

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.used(inputs)


def shares():
    """Return inputs and labels of two ranks' samples, eleven and three."""
    both = Stream(14, seed=2)
    return [(both.inputs[:11], both.labels[:11]), (both.inputs[11:], both.labels[11:])]


def mean_of_first(outputs, batch):
    """Return the sum of the samples' first numbers, and how many samples there are."""
    return batch[0][:, 0].sum().double(), len(batch[0])


def on_two_ranks(rank, folder):
    found = {}
    model = nn.Linear(4, 3)
    engine = TrainingEngine(model, "cpu", distributed=True, output_dir=folder)
    stream = DataLoader(Stream(40 if rank else 24, seed=rank), batch_size=8)
    told = pytest.warns(UserWarning, match="ended after 3 steps.*1 of 2 ranks had more")
    with nullcontext() if rank else told:
        history = engine.train(stream, None, sgd(model), nn.CrossEntropyLoss(), num_epochs=2)
    found["stream"] = (engine.step, len(history["epoch"]), digest(model.state_dict()))

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    own = TensorDataset(*shares()[rank])
    f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
    scores = validate(
        model,
        current_world(),
        nn.CrossEntropyLoss(),
        DataLoader(own, batch_size=4),
        metrics={"f1": f1, "mean": mean_of_first},
    )
    found["scores"] = scores._asdict()
    with pytest.raises(UserError, match="'own' is a Scripted of one rank"):  # before any step
        engine.train(stream, stream, None, None, num_epochs=1, metrics={"own": Scripted([])})
    shorter = [(torch.randn(2, 4), torch.tensor([0, 2]))] * (2 + rank)
    with pytest.raises(UserError, match="number of batches in train_loader"):
        engine.train(shorter, None, sgd(model), nn.CrossEntropyLoss(), num_epochs=1)

    records = []
    engine = prepared(nn.Linear(4, 3), "all_reduce")
    batches = [(torch.randn(2, 4), torch.tensor([0, 2]))] * 4
    engine.train_epoch(SlowList(batches, 0.5 * rank), epoch=1, log_every=1, on_steps=records.extend)
    engine.close()
    later = records[1:]
    found["times"] = (
        sum(one.wait_seconds for one in later),
        sum(one.step_seconds - sum(one.seconds.values()) for one in later),
        sum(one.data_seconds for one in later),
    )

    engine = prepared(TwoHeads(), "ddp")
    with pytest.raises(UserError, match=r"spare\.weight, spare\.bias\. Freeze them"):
        engine.train_epoch(DataLoader(own, batch_size=2), epoch=1)
    engine.close()
    return found


def test_ranks_end_a_stream_together_and_share_metrics(tmp_path):
    first, second = run_ranks(2, on_two_ranks, str(tmp_path))
    assert first["stream"] == second["stream"]
    assert first["stream"][:2] == (6, 2), "three steps an epoch, as many as rank 0 has batches"

    wait, outside, data = first["times"]
    assert wait > 0.75, "rank 1 loads its batches for 1.5 s longer"
    assert outside < 0.75, "the wait is in a section"
    assert data < 0.75 < second["times"][2]

    scores = first["scores"]
    assert second["scores"] == scores
    inputs, labels = (torch.cat(parts) for parts in zip(*shares(), strict=True))
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    alone = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
    f1 = float(alone(model(inputs), labels))
    assert 0 < f1 < 1
    assert scores["metrics"]["f1"] == pytest.approx(f1, rel=1e-6)
    mean = float(inputs[:, 0].double().mean())
    assert scores["metrics"]["mean"] == pytest.approx(mean, rel=1e-6)
    assert scores["accuracy"] == float((model(inputs).argmax(1) == labels).double().mean())


# --- seeds and callbacks ---


def test_a_seed_draws_the_models_first_weights(tmp_path):
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))

    def losses(seed):
        return distributed_train_worker(
            0,
            1,
            model_fn=lambda: nn.Linear(4, 3),
            train_dataset=data,
            batch_size=8,
            optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            criterion_fn=nn.CrossEntropyLoss,
            engine_kwargs={"output_dir": tmp_path},
            train_kwargs={"num_epochs": 1, "seed": seed},
        )["train_loss"]

    assert losses(7) == losses(7) != losses(8)


def test_a_checkpoint_every_few_steps_is_a_callback_of_train(tmp_path):
    saver = CheckpointManager(
        tmp_path / "steps", policy=SavePolicy(every_steps=2, every_epochs=0, best=False)
    )
    batches = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))] * 5
    trained(tmp_path, nn.Linear(4, 3), batches, None, nn.CrossEntropyLoss(), callbacks=[saver])
    written = sorted(path.name for path in (tmp_path / "steps").iterdir())
    assert [load_checkpoint(Path(tmp_path, "steps", name))["step"] for name in written] == [
        2,
        4,
        10,
        6,
        8,
    ]
