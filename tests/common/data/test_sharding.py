"""Which rank sees which sample, by sample ids for 1 to 5 ranks: the sampler and both loaders."""

import pytest
import torch

from common.data.dataset import Dataset, ImageSet
from common.data.loaders import EvaluationLoader, TrainLoader
from common.data.sharding import GlobalBatchSampler, epoch_order
from common.errors import UserError

RANKS = (1, 2, 3, 4, 5)
# (samples, global batch size): divisible by all ranks; a batch or a set that is not; a rest of 1,
# of 4 (two samples for each of 2 ranks), of 9 (too small for 5 ranks); a batch larger than the set;
# a set of one batch; the assignment's own.
SIZES = [(120, 60), (100, 32), (97, 10), (101, 20), (64, 13), (49, 20), (104, 10), (23, 256)]
SIZES += [(40, 40), (1437, 256)]

_ids = [f"{samples}by{batch}" for samples, batch in SIZES]


def _epoch(samples, batch, world, *, seed=0, epoch=1):
    """Return all ranks' batches of an epoch: by rank, a list of lists of ids."""
    ranks = []
    for rank in range(world):
        sampler = GlobalBatchSampler(
            samples, batch_size=batch, rank=rank, world_size=world, seed=seed
        )
        sampler.set_epoch(epoch)
        ranks.append([ids.tolist() for ids in sampler])
        assert len(ranks[-1]) == len(sampler)
    return ranks


def _global_batches(ranks):
    return [[sample for rank in step for sample in rank] for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize(("samples", "batch"), SIZES, ids=_ids)
def test_each_sample_comes_exactly_once_an_epoch(samples, batch, world):
    """Over all ranks no training sample is missing, also from a smaller last batch, or repeated."""
    for epoch in (1, 2):
        steps = _global_batches(_epoch(samples, batch, world, epoch=epoch))
        seen = sorted(sample for step in steps for sample in step)
        assert seen == list(range(samples)), "samples come never or twice"


@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize(("samples", "batch"), SIZES, ids=_ids)
def test_batches_are_full_but_the_last_and_shared_evenly(samples, batch, world):
    """Shares differ by at most one, and have at least two; the engine gets the real sizes."""
    ranks = _epoch(samples, batch, world)
    sizes = [len(step) for step in _global_batches(ranks)]
    rest = samples % batch
    joins = 0 < rest < 2 * world and samples > batch
    assert sizes[:-1] == [batch] * (len(sizes) - 1)
    assert sizes[-1] == (batch + rest if joins else rest or batch)
    for step in zip(*ranks, strict=True):
        shares = [len(share) for share in step]
        assert min(shares) >= 2
        assert max(shares) - min(shares) <= 1
    for rank in range(world):
        sampler = GlobalBatchSampler(samples, batch_size=batch, rank=rank, world_size=world)
        assert sampler.global_batch_sizes == sizes, "the loss would be weighted by other sizes"


@pytest.mark.parametrize(("samples", "batch"), SIZES, ids=_ids)
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples, batch):
    """Only a rest of less than two samples per rank joins the batch before it."""
    alone = _global_batches(_epoch(samples, batch, 1, seed=5, epoch=3))
    for world in RANKS[1:]:
        steps = _global_batches(_epoch(samples, batch, world, seed=5, epoch=3))
        if len(alone) > 1 and len(alone[-1]) < 2 * world:
            assert steps == [*alone[:-2], alone[-2] + alone[-1]]
        else:
            assert steps == alone


def test_order_is_new_each_epoch_and_the_same_for_the_same_seed():
    """The order is a permutation that depends only on seed and epoch."""
    torch.manual_seed(1)
    first = epoch_order(500, seed=0, epoch=1)
    torch.manual_seed(2)
    assert torch.equal(first, epoch_order(500, seed=0, epoch=1))
    others = [
        epoch_order(500, seed=seed, epoch=epoch)
        for seed, epoch in ((0, 2), (0, 3), (1, 1), (1, 2), (2, 1))
    ]
    orders = [first, *others]
    for i, one in enumerate(orders):
        assert sorted(one.tolist()) == list(range(500))
        for other in orders[:i]:
            # Two random permutations agree in one place on average.
            assert int((one == other).sum()) < 10, "two epochs have the same order"
    assert int((first == torch.arange(500)).sum()) < 10


def test_ranks_see_different_samples_in_each_step():
    """The commonest mistake, the same batch on every rank, would fail here."""
    ranks = _epoch(100, 20, 4)
    for step in zip(*ranks, strict=True):
        seen = [sample for share in step for sample in share]
        assert len(set(seen)) == len(seen) == 20, "two ranks have the same sample"


@pytest.mark.parametrize("world", RANKS)
def test_less_than_two_samples_a_rank_are_refused(world):
    """The message has the flag or what is small, the value and the minimum; two suffice."""
    few, least = 2 * world - 1, 2 * world
    with pytest.raises(UserError, match=rf"--batch-size.*got {few}.*give {least} or more"):
        GlobalBatchSampler(1000, batch_size=few, world_size=world)
    with pytest.raises(UserError, match=rf"{few} images.*{world} rank"):
        GlobalBatchSampler(few, batch_size=64, world_size=world)
    sampler = GlobalBatchSampler(least, batch_size=least, world_size=world)
    assert [len(ids) for ids in sampler] == [2]


# --- the loaders, with images that contain their number ---


def _marked_set(samples):
    """Return images whose pixels contain their number; the label is the number modulo 7.

    Channels 0 and 1 of every pixel hold the two digits in base 200, plus 1, so that one true pixel
    in a crop suffices. Channel 2 is a gradient, which shows crop and flip.
    """
    number = torch.arange(samples)
    images = torch.empty(samples, 32, 32, 3, dtype=torch.uint8)
    images[..., 0] = (number // 200 + 1)[:, None, None]
    images[..., 1] = (number % 200 + 1)[:, None, None]
    images[..., 2] = torch.arange(32)[:, None] * 4 + torch.arange(32)
    return ImageSet(images, number % 7)


def _numbers(batch):
    """Return a batch's sample numbers, read in the middle of each image: every crop keeps it."""
    middle = batch[:, :, 16, 16].round().long()
    return ((middle[:, 0] - 1) * 200 + middle[:, 1] - 1).tolist()


def _marked_dataset(samples):
    whole = _marked_set(samples)
    return Dataset("marked", whole, whole, tuple("abcdefg"), (0.0,) * 3, (1 / 255,) * 3)


def _by_sample(dataset, batch, world, *, seed=0, epoch=1, **options):
    """Return all ranks' augmented images of an epoch by sample; check that each comes once.

    A cutout may hide an image's number, so with it the sampler's ids are trusted.
    """
    found = {}
    for rank in range(world):
        sampler = GlobalBatchSampler(
            len(dataset.train), batch_size=batch, rank=rank, world_size=world, seed=seed
        )
        sampler.set_epoch(epoch)
        loader = TrainLoader(dataset, sampler, **options)
        steps = list(loader)
        assert len(steps) == len(loader) == len(loader.global_batch_sizes)
        for (images, labels), ids in zip(steps, loader.sampler, strict=True):
            assert "cutout" in options or _numbers(images) == ids.tolist()
            assert labels.dtype == torch.int64
            assert torch.equal(labels, ids % 7)
            for image, sample in zip(images, ids.tolist(), strict=True):
                assert sample not in found
                found[sample] = image.clone()
    assert sorted(found) == list(range(len(dataset.train)))
    return found


@pytest.mark.parametrize("world", RANKS)
def test_train_loader_yields_the_images_of_the_ids(world):
    """The images and labels of each step match the sampler's ids; each image comes once."""
    _by_sample(_marked_dataset(307), 64, world)


@pytest.mark.parametrize("options", [{}, {"flip": "alternating", "cutout": 8}])
def test_a_sample_is_augmented_alike_on_any_number_of_ranks(options):
    """The same bits on 1 to 5 ranks, and in other batch sizes."""
    dataset = _marked_dataset(307)
    alone = _by_sample(dataset, 64, 1, epoch=2, **options)
    torch.manual_seed(99)  # the global random stream must not matter
    for world, batch in ((2, 64), (3, 64), (4, 50), (5, 64)):
        for sample, image in _by_sample(dataset, batch, world, epoch=2, **options).items():
            told = f"another crop or flip on {world} ranks: sample {sample}"
            assert torch.equal(image, alone[sample]), told


def test_set_epoch_and_seed_change_the_augmentation():
    """Each sample has its own: most of the 162 combinations of crop and flip occur in 307."""
    dataset = _marked_dataset(307)
    first = _by_sample(dataset, 64, 2, epoch=1)
    again = _by_sample(dataset, 64, 2, epoch=1)
    assert all(torch.equal(first[sample], again[sample]) for sample in first)
    for place in ({"epoch": 2}, {"seed": 1}):
        other = _by_sample(dataset, 64, 2, **place)
        unchanged = sum(torch.equal(first[sample], other[sample]) for sample in first)
        assert unchanged < 20, place
    assert len({image[2].numpy().tobytes() for image in first.values()}) > 100  # 137 expected


@pytest.mark.parametrize(
    ("samples", "world"), [*((10_000, world) for world in RANKS), (1, 5), (2, 5), (4, 5), (5, 5)]
)
def test_evaluation_gives_each_sample_one_prediction(samples, world):
    """None comes twice, none is missing, and there is no padding; a rank may have none."""
    test_set, seen = _marked_set(samples), []
    places = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3, "batch_size": 501, "world_size": world}
    for rank in range(world):
        loader = EvaluationLoader(test_set, rank=rank, **places)
        steps = list(loader)
        assert len(steps) == len(loader)
        numbers = [number for images, _ in steps for number in _numbers(images)]
        assert numbers == loader.ids.tolist()
        labels = [label for _, labels in steps for label in labels.tolist()]
        assert labels == [number % 7 for number in numbers]
        assert abs(len(numbers) - samples / world) < 1
        for images, _ in steps[:1]:
            assert (images[:, 2].round() == test_set.images[0, :, :, 2]).all()
        seen += numbers
    assert sorted(seen) == list(range(samples))
