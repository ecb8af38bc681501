"""Crop, flip and normalisation: equal to torchvision's, drawn uniformly; cutout."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import functional, transforms

from common.config.schema import Config
from common.data.augmentation import Draws, Normaliser, RandomCropFlip, cut_out, draw, draw_centres
from common.data.dataset import Dataset, ImageSet
from common.data.loaders import EvaluationLoader, TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.training_plan import make_plan

MEAN, STD = (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)
SAMPLES = 12_000


def _pictures(n, *, seed=0, size=32):
    """Return images similar to photographs: uint8 of shape (n, size, size, 3)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 6, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    noise = 0.03 * torch.randn(n, 3, size, size, generator=generator)
    images = (smooth * 1.4 - 0.2 + noise).clamp(0, 1)
    colours = torch.rand(n, 3, 1, 1, generator=generator)
    images[:, :, size // 3 : size // 2, size // 4 : size // 2] = colours
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _torchvision(image, top=4, left=4, flip=False):
    """Return one picture after torchvision's Pad, crop, hflip, ToTensor and Normalize."""
    height, width = image.shape[:2]
    picture = transforms.Pad(4)(Image.fromarray(image.numpy()))
    picture = functional.crop(picture, top, left, height, width)
    if flip:
        picture = functional.hflip(picture)
    return transforms.Normalize(MEAN, STD)(transforms.ToTensor()(picture))


def _equals_torchvision(batch, images, ids, draws):
    for row, i in zip(batch, ids.tolist(), strict=True):
        place = int(draws.top[i]), int(draws.left[i]), bool(draws.flip[i])
        torch.testing.assert_close(row, _torchvision(images[i], *place), rtol=0, atol=1e-6)


def _dataset(images):
    whole = ImageSet(images, torch.arange(len(images)) % 3)
    return Dataset("pictures", whole, whole, ("a", "b", "c"), MEAN, STD)


_EVERY_CROP = torch.arange(162)


@pytest.mark.parametrize(
    ("images", "ids", "draws"),
    [
        pytest.param(
            _pictures(162),
            _EVERY_CROP,
            Draws(_EVERY_CROP % 9, _EVERY_CROP // 9 % 9, _EVERY_CROP >= 81),
            id="all 81 crops, flipped or not",
        ),
        pytest.param(
            _pictures(50, seed=1),
            torch.tensor([49, 0, 17, 17, 3, 31]),  # in any order and repeated
            draw(50, seed=3, epoch=4, flip="random"),
            id="each id has its own image and draws",
        ),
        pytest.param(
            _pictures(8, seed=3, size=48)[:, :24],
            torch.arange(8),
            draw(8, seed=0, epoch=1, flip="random"),
            id="height and width are not mixed up",
        ),
    ],
)
def test_equals_torchvision(images, ids, draws):
    batch = Normaliser(MEAN, STD, width=images.shape[2])(RandomCropFlip(images)(ids, draws))
    assert batch.shape == (len(ids), 3, *images.shape[1:3])
    _equals_torchvision(batch, images, ids, draws)


def test_loaders_equal_torchvision_for_the_drawn_offsets():
    """The evaluation loader gives the result of ToTensor and Normalize alone."""
    dataset = _dataset(_pictures(40, seed=2))
    sampler = GlobalBatchSampler(40, batch_size=16, rank=1, world_size=2, seed=7)
    sampler.set_epoch(2)
    draws = draw(40, seed=7, epoch=2, flip="random")
    for (batch, _), ids in zip(TrainLoader(dataset, sampler), sampler, strict=True):
        _equals_torchvision(batch, dataset.train.images, ids, draws)
    batch, _ = next(iter(EvaluationLoader(dataset.test, mean=MEAN, std=STD)))
    for row, image in zip(batch, dataset.test.images, strict=True):
        torch.testing.assert_close(row, _torchvision(image), rtol=0, atol=1e-6)


def test_normaliser_on_every_byte_value():
    images = torch.arange(256, dtype=torch.uint8).view(1, 8, 32, 1).repeat(1, 1, 1, 3)
    batch = Normaliser(MEAN, STD, width=32)(images)
    torch.testing.assert_close(batch[0], _torchvision(images[0]), rtol=0, atol=1e-6)


def test_batches_are_channels_last_float32_whatever_the_sources_strides():
    """torchvision's CIFAR is stored channel by channel. The last batch of an epoch is smaller."""
    plain = _pictures(21, seed=6)
    turned = plain.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert turned.stride() != plain.stride()
    datasets = [_dataset(images) for images in (plain, turned)]
    training = [TrainLoader(dataset, GlobalBatchSampler(21, batch_size=8)) for dataset in datasets]
    evaluation = [
        EvaluationLoader(dataset.test, mean=MEAN, std=STD, batch_size=8) for dataset in datasets
    ]
    for loaders in (training, evaluation):
        for (one, labels), (other, _) in zip(*loaders, strict=True):
            assert torch.equal(one, other)
            assert one.dtype == torch.float32
            assert one.shape == (len(labels), 3, 32, 32)
            assert one.stride() == other.stride() == (32 * 32 * 3, 1, 32 * 3, 3)


# --- distribution, with fixed seeds: no test depends on luck ---


def _chi_square(values, kinds):
    return stats.chisquare(torch.bincount(values, minlength=kinds).numpy()).pvalue


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (0, 2), (1, 1)])
def test_crops_and_flips_are_uniform_and_independent(seed, epoch):
    """The draw of a sample says nothing about the other axis, the next epoch, seed or sample."""
    draws = draw(SAMPLES, seed=seed, epoch=epoch, flip="random")
    top, left, flips = draws.top, draws.left, draws.flip.long()
    assert (top.dtype, left.dtype, draws.flip.dtype) == (torch.int64, torch.int64, torch.bool)
    for values, kinds in ((top, 9), (left, 9), (flips, 2), ((top * 9 + left) * 2 + flips, 162)):
        assert (int(values.min()), int(values.max())) == (0, kinds - 1)
        assert _chi_square(values, kinds) > 0.01
    for one, other, kinds in ((top, left, 9), (top, flips, 2), (left, flips, 2)):
        assert _related(one, other, kinds) > 0.01
    for place in ({"seed": seed, "epoch": epoch + 1}, {"seed": seed + 1, "epoch": epoch}):
        other = draw(SAMPLES, flip="random", **place)
        assert _related(top, other.top, 9) > 0.01
        same = int((draws.flip == other.flip).sum())
        assert stats.binomtest(same, SAMPLES, 0.5).pvalue > 0.01
    assert _related(top, top.roll(1), 9) > 0.01


def _related(one, other, kinds):
    """Return the p-value that ``one``, of 9 kinds, says nothing about ``other``."""
    table = torch.bincount(one * kinds + other, minlength=9 * kinds).view(9, kinds)
    return stats.chi2_contingency(table.numpy()).pvalue


def test_no_flips_where_a_mirrored_image_is_another():
    """Digits are only shifted, since a mirrored 3 is not a digit, by the same offsets."""
    with_flips, without = (draw(SAMPLES, seed=0, epoch=1, flip=flip) for flip in ("random", "none"))
    assert not without.flip.any()
    assert torch.equal(with_flips.top, without.top)
    assert torch.equal(with_flips.left, without.left)
    digits = replace(_dataset(_pictures(40)), flip=False)
    sampler = GlobalBatchSampler(40, batch_size=20)
    draws = draw(40, seed=0, epoch=1, flip="none")
    for (batch, _), ids in zip(TrainLoader(digits, sampler), sampler, strict=True):
        _equals_torchvision(batch, digits.train.images, ids, draws)


def test_draws_of_a_seed_stay_as_they_were():
    """Runs of earlier versions can be repeated; torch's generator sets the initial weights."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draws = draw(50_000, seed=0, epoch=2, flip="random")
    assert torch.equal(torch.rand(3), expected)
    assert draws.top[:8].tolist() == [1, 5, 3, 0, 2, 0, 0, 2]
    assert draws.left[:8].tolist() == [6, 4, 5, 6, 7, 7, 6, 1]
    assert draws.flip[:8].long().tolist() == [1, 1, 1, 0, 0, 1, 0, 1]
    assert int((draws.top * 3 + draws.left * 5 + draws.flip * 7).sum()) == 1777102


# --- alternating flip ---


def test_alternating_flips_mirror_every_image_in_one_of_two_epochs():
    """Drawn in any order, as by a resumed run; offsets are as with random flips."""
    fourth, first, second, third = (
        draw(SAMPLES, seed=3, epoch=epoch, flip="alternating") for epoch in (4, 1, 2, 3)
    )
    assert stats.binomtest(int(first.flip.sum()), SAMPLES, 0.5).pvalue > 0.01
    assert torch.equal(second.flip, ~first.flip)
    assert torch.equal(third.flip, first.flip)
    assert torch.equal(fourth.flip, second.flip)
    other_seed = draw(SAMPLES, seed=4, epoch=1, flip="alternating").flip
    assert stats.binomtest(int((other_seed == first.flip).sum()), SAMPLES, 0.5).pvalue > 0.01
    by_chance = draw(SAMPLES, seed=3, epoch=2, flip="random")
    assert torch.equal(second.top, by_chance.top)
    assert torch.equal(second.left, by_chance.left)


# --- cutout ---


@pytest.mark.parametrize("size", [1, 7, 8, 40])
def test_cutout_zeroes_the_square_and_nothing_else(size):
    """An even square reaches one pixel further up and left, as in the authors' code."""
    images = 1 + torch.rand(60, 3, 24, 32).to(memory_format=torch.channels_last)
    centres = draw_centres(60, height=24, width=32, seed=0, epoch=1)
    centres[:, :4] = torch.tensor([[0, 0, 23, 23], [0, 31, 0, 31]])
    expected = images.clone()
    for image, row, column in zip(expected, *centres.tolist(), strict=True):
        top, left = row - size // 2, column - size // 2
        image[:, max(0, top) : top + size, max(0, left) : left + size] = 0
    cut_out(images, centres, size=size)
    assert torch.equal(images, expected)
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_centres_of_cutouts_are_uniform_and_unrelated():
    """Every pixel is a centre equally often; epochs and seeds have unrelated centres."""
    rows, columns = first = draw_centres(SAMPLES, height=8, width=12, seed=0, epoch=1)
    assert _chi_square(rows * 12 + columns, 96) > 0.01
    for place in ({"seed": 0, "epoch": 2}, {"seed": 1, "epoch": 1}):
        other = draw_centres(SAMPLES, height=8, width=12, **place)
        for one, another, side in zip(first, other, (8, 12), strict=True):
            table = torch.bincount(one * side + another, minlength=side**2).view(side, side)
            assert stats.chi2_contingency(table.numpy()).pvalue > 0.01


def test_the_loader_cuts_normalised_images():
    """With cutout, batches equal those without, except for squares of zeros: the mean colour."""
    dataset = _dataset(_pictures(40, seed=2))
    sampler = GlobalBatchSampler(40, batch_size=16, seed=7)
    sampler.set_epoch(2)
    centres = draw_centres(40, height=32, width=32, seed=7, epoch=2)
    both = zip(TrainLoader(dataset, sampler), TrainLoader(dataset, sampler, cutout=9), strict=True)
    for ((whole, labels), (cut, same_labels)), ids in zip(both, sampler, strict=True):
        cut_out(whole, centres[:, ids], size=9)
        assert torch.equal(cut, whole)
        assert torch.equal(labels, same_labels)


def test_the_flags_reach_the_loader():
    """The plan's loader augments as --flip and --cutout say, in two epochs."""
    dataset = _dataset(_pictures(40, seed=2))
    for options in ({}, {"flip": "none"}, {"flip": "alternating", "cutout": 8}):
        config = Config(part="PartOne", batch_size=20, seed=5, **options)
        planned, _ = make_plan(config, LaunchSpec(), World(), dataset, "", None)
        loader = TrainLoader(dataset, GlobalBatchSampler(40, batch_size=20, seed=5), **options)
        for epoch in (1, 2):
            planned.sampler.set_epoch(epoch)
            loader.sampler.set_epoch(epoch)
            for (one, _), (other, _) in zip(planned, loader, strict=True):
                assert torch.equal(one, other)
