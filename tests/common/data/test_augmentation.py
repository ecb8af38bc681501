"""Crop, flip and normalisation: equal to torchvision's, drawn uniformly; cutout; no host waits."""

from collections.abc import Iterator

import pytest
import torch
from PIL import Image, ImageFilter
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms import functional, transforms

from common.config.schema import Config
from common.data.augmentation import (
    PADDING,
    Draws,
    Normaliser,
    RandomCropFlip,
    cut_out,
    draw,
    draw_centres,
)
from common.data.dataset import Dataset, ImageSet
from common.data.loaders import EvaluationLoader, TrainLoader
from common.data.sharding import GlobalBatchSampler
from common.distributed.launch_env import LaunchSpec
from common.distributed.process_group import World
from common.experiment.training_plan import make_plan

MEAN, STD = (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)
SAMPLES = 12_000


def _pictures(n, *, seed=0, size=32):
    """Return blurred noise with sharp edges over the full scale, similar to photographs.

    The result is uint8 of shape (n, size, size, 3).
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 6, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    images = (smooth * 1.4 - 0.2 + 0.03 * torch.randn(n, 3, size, size, generator=generator)).clamp(
        0, 1
    )
    images[:, :, size // 3 : size // 2, size // 4 : size // 2] = torch.rand(
        n, 3, 1, 1, generator=generator
    )
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _torchvision(image, top, left, flip):
    """Return one picture after torchvision's Pad, crop, hflip, ToTensor and Normalize."""
    size = image.shape[0]
    picture = transforms.Pad(4)(Image.fromarray(image.numpy()))
    picture = functional.crop(picture, top, left, size, size)
    if flip:
        picture = functional.hflip(picture)
    return transforms.Normalize(MEAN, STD)(transforms.ToTensor()(picture))


def test_equals_torchvision_for_every_offset_and_flip():
    """All 81 crops, flipped or not, equal torchvision's within 1e-6.

    The corners include their padding.
    """
    images = _pictures(162)
    places = torch.arange(162)
    draws = Draws(places % 9, places // 9 % 9, places >= 81)
    batch = Normaliser(MEAN, STD, width=32)(RandomCropFlip(images)(places, draws))
    for i in range(162):
        expected = _torchvision(
            images[i], int(draws.top[i]), int(draws.left[i]), bool(draws.flip[i])
        )
        torch.testing.assert_close(batch[i], expected, rtol=0, atol=1e-6)


def test_ids_choose_the_images_and_their_draws():
    """Each id of a batch, in any order or repeated, gets its own image, offsets and flip."""
    images = _pictures(50, seed=1)
    draws = draw(50, seed=3, epoch=4, flip="random")
    ids = torch.tensor([49, 0, 17, 17, 3, 31])
    batch = Normaliser(MEAN, STD, width=32)(RandomCropFlip(images)(ids, draws))
    for row, i in zip(batch, ids.tolist(), strict=True):
        expected = _torchvision(
            images[i], int(draws.top[i]), int(draws.left[i]), bool(draws.flip[i])
        )
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)


def test_loader_equals_torchvision_for_the_drawn_offsets():
    """The training loader gives torchvision's result for the offsets from ``draw``.

    The evaluation loader gives that of ToTensor and Normalize alone.
    """
    images = ImageSet(_pictures(40, seed=2), torch.arange(40) % 3)
    dataset = Dataset("pictures", images, images, ("a", "b", "c"), MEAN, STD)
    sampler = GlobalBatchSampler(40, batch_size=16, rank=1, world_size=2, seed=7)
    sampler.set_epoch(2)
    draws = draw(40, seed=7, epoch=2, flip="random")
    for (batch, _), ids in zip(TrainLoader(dataset, sampler), sampler, strict=True):
        for row, i in zip(batch, ids.tolist(), strict=True):
            expected = _torchvision(
                images.images[i], int(draws.top[i]), int(draws.left[i]), bool(draws.flip[i])
            )
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
    batch, _ = next(iter(EvaluationLoader(images, mean=MEAN, std=STD)))
    for row, image in zip(batch, images.images, strict=True):
        expected = transforms.Normalize(MEAN, STD)(
            transforms.ToTensor()(Image.fromarray(image.numpy()))
        )
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)


def test_normaliser_on_every_byte_value():
    """Each of the 256 values in each channel equals ToTensor and Normalize within 1e-6."""
    images = torch.arange(256, dtype=torch.uint8).view(1, 8, 32, 1).repeat(1, 1, 1, 3)
    expected = transforms.Normalize(MEAN, STD)(
        transforms.ToTensor()(Image.fromarray(images[0].numpy()))
    )
    torch.testing.assert_close(
        Normaliser(MEAN, STD, width=32)(images)[0], expected, rtol=0, atol=1e-6
    )


def test_images_need_not_be_square():
    """Height and width are not mixed up."""
    images = _pictures(8, seed=3, size=48)[:, :24]
    draws = draw(8, seed=0, epoch=1, flip="random")
    batch = Normaliser(MEAN, STD, width=48)(RandomCropFlip(images)(torch.arange(8), draws))
    assert batch.shape == (8, 3, 24, 48)
    for i in range(8):
        picture = functional.crop(
            transforms.Pad(4)(Image.fromarray(images[i].numpy())),
            int(draws.top[i]),
            int(draws.left[i]),
            24,
            48,
        )
        picture = functional.hflip(picture) if draws.flip[i] else picture
        expected = transforms.Normalize(MEAN, STD)(transforms.ToTensor()(picture))
        torch.testing.assert_close(batch[i], expected, rtol=0, atol=1e-6)


def test_strides_of_the_source_do_not_matter():
    """A set stored channel by channel, like torchvision's CIFAR, gives the same batches.

    The strides of the batches are also the same.
    """
    labels = torch.arange(20) % 3
    plain = _pictures(20, seed=6)
    turned = plain.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert turned.stride() != plain.stride()
    sets = [ImageSet(images, labels) for images in (plain, turned)]
    datasets = [Dataset("pictures", images, images, ("a", "b", "c"), MEAN, STD) for images in sets]
    training = [TrainLoader(dataset, GlobalBatchSampler(20, batch_size=8)) for dataset in datasets]
    evaluation = [EvaluationLoader(images, mean=MEAN, std=STD, batch_size=8) for images in sets]
    for loaders in (training, evaluation):
        for (one, _), (other, _) in zip(*loaders, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def test_the_set_is_left_as_it_was():
    """Crops and flips work on copies: the next epoch starts from the same images."""
    images = _pictures(10, seed=4)
    before = images.clone()
    cut = RandomCropFlip(images)
    everywhere = torch.arange(10)
    ones = torch.ones(10, dtype=torch.int64)
    first = cut(everywhere, Draws(ones * 4, ones * 4, ones == 1))
    assert torch.equal(first, before.flip(2))
    assert torch.equal(cut(everywhere, Draws(ones * 4, ones * 4, ones == 0)), before)
    assert torch.equal(images, before)


def test_result_is_float32_channels_last():
    """Batches have channels_last strides without a copy, also the last batch of an epoch."""
    images = ImageSet(_pictures(21, seed=5), torch.arange(21) % 3)
    dataset = Dataset("pictures", images, images, ("a", "b", "c"), MEAN, STD)
    for loader in (
        TrainLoader(dataset, GlobalBatchSampler(21, batch_size=8)),
        EvaluationLoader(images, mean=MEAN, std=STD, batch_size=8),
    ):
        for batch, labels in loader:
            assert batch.dtype == torch.float32
            assert batch.shape == (len(labels), 3, 32, 32)
            assert batch.stride() == (32 * 32 * 3, 1, 32 * 3, 3)
            assert batch.is_contiguous(memory_format=torch.channels_last)


# --- distribution, with fixed seeds: no test depends on luck ---


def _chi_square(values, kinds):
    return stats.chisquare(torch.bincount(values, minlength=kinds).numpy()).pvalue


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (0, 2), (1, 1)])
def test_offsets_are_uniform_from_0_to_8(seed, epoch):
    """Each of the 9 offsets of an axis is equally frequent (chi-square), and there is no other.

    Offsets of 0 to 7, from an exclusive upper bound, or a bell shape would fail.
    """
    draws = draw(SAMPLES, seed=seed, epoch=epoch, flip="random")
    for offsets in (draws.top, draws.left):
        assert offsets.dtype == torch.int64
        assert offsets.shape == (SAMPLES,)
        assert (int(offsets.min()), int(offsets.max())) == (0, 2 * PADDING)
        assert _chi_square(offsets, 9) > 0.01


def test_axes_and_flips_are_independent():
    """Top, left and flip are independent: all 162 combinations are equally frequent.

    A contingency test checks each pair. The same number for both axes would fail.
    """
    draws = draw(SAMPLES, seed=0, epoch=1, flip="random")
    assert _chi_square((draws.top * 9 + draws.left) * 2 + draws.flip.long(), 162) > 0.01
    for one, other, kinds in (
        (draws.top, draws.left, 9),
        (draws.top, draws.flip.long(), 2),
        (draws.left, draws.flip.long(), 2),
    ):
        table = torch.bincount(one * kinds + other, minlength=9 * kinds).view(9, kinds)
        assert stats.chi2_contingency(table.numpy()).pvalue > 0.01


def test_a_sample_gets_unrelated_draws_in_neighbouring_epochs_and_seeds():
    """The draw of a sample says nothing about the next epoch, seed or sample."""
    first = draw(SAMPLES, seed=0, epoch=1, flip="random").top
    for other in (
        draw(SAMPLES, seed=0, epoch=2, flip="random").top,
        draw(SAMPLES, seed=1, epoch=1, flip="random").top,
        first.roll(1),
    ):
        table = torch.bincount(first * 9 + other, minlength=81).view(9, 9)
        assert stats.chi2_contingency(table.numpy()).pvalue > 0.01


def test_half_of_the_samples_are_flipped():
    """In each of three epochs half of the samples are flipped, and not always the same ones.

    The bounds are those of a binomial test.
    """
    flips = [draw(SAMPLES, seed=0, epoch=epoch, flip="random").flip for epoch in (1, 2, 3)]
    for flip in flips:
        assert flip.dtype == torch.bool
        assert stats.binomtest(int(flip.sum()), SAMPLES, 0.5).pvalue > 0.01
    assert stats.binomtest(int((flips[0] == flips[1]).sum()), SAMPLES, 0.5).pvalue > 0.01


def test_no_flips_where_a_mirrored_image_is_another():
    """Without flips (digits) no sample is flipped, and the offsets are the same as with flips."""
    with_flips, without = (draw(SAMPLES, seed=0, epoch=1, flip=flip) for flip in ("random", "none"))
    assert not without.flip.any()
    assert torch.equal(with_flips.top, without.top)
    assert torch.equal(with_flips.left, without.left)


def test_the_loader_never_flips_digits():
    """Each training digit is only shifted, since a mirrored 3 is not a digit."""
    from common.data import load_dataset

    digits = load_dataset("digits", "unused")
    assert digits.flip is False
    digits = Dataset(
        "digits",
        digits.train,
        digits.test,
        digits.class_names,
        (0.0,) * 3,
        (1 / 255,) * 3,
        flip=digits.flip,
    )
    sampler = GlobalBatchSampler(len(digits.train), batch_size=300)
    draws = draw(len(digits.train), seed=0, epoch=1, flip="none")
    padded = torch.nn.functional.pad(digits.train.images, (0, 0, 4, 4, 4, 4))
    batch, _ = next(iter(TrainLoader(digits, sampler)))
    for row, i in zip(batch, next(iter(sampler)).tolist(), strict=True):
        top, left = int(draws.top[i]), int(draws.left[i])
        assert torch.equal(
            row.round().to(torch.uint8).permute(1, 2, 0),
            padded[i, top : top + 32, left : left + 32],
        )


def test_draws_do_not_touch_the_global_stream():
    """Drawing neither reads nor changes torch's own generator, which sets the initial weights."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = draw(100, seed=0, epoch=1, flip="random")
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.top, draw(100, seed=0, epoch=1, flip="random").top)


def test_draws_of_a_seed_stay_as_they_were():
    """Runs of earlier versions can be repeated: their offsets and flips are written down here."""
    draws = draw(50_000, seed=0, epoch=2, flip="random")
    assert draws.top[:8].tolist() == [1, 5, 3, 0, 2, 0, 0, 2]
    assert draws.left[:8].tolist() == [6, 4, 5, 6, 7, 7, 6, 1]
    assert draws.flip[:8].long().tolist() == [1, 1, 1, 0, 0, 1, 0, 1]
    assert int((draws.top * 3 + draws.left * 5 + draws.flip * 7).sum()) == 1777102


# --- alternating flip ---


def test_alternating_flips_mirror_every_image_in_one_of_two_epochs():
    """The first epoch mirrors a random half, each later one exactly the others.

    The epochs are drawn in any order, as by a resumed run. Offsets are as with random flips.
    """
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


def test_an_unknown_flip_is_refused():
    with pytest.raises(ValueError, match="flip: got 'both', choose random, alternating, none"):
        draw(8, seed=0, epoch=1, flip="both")


# --- cutout ---


@pytest.mark.parametrize("size", [1, 7, 8, 40])
def test_cutout_zeroes_the_square_and_nothing_else(size):
    """Each image loses the square around its centre, clipped at the borders, in all channels.

    The centres include corners. An even square reaches one pixel further up and left, as in the
    authors' code.
    """
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
    images = ImageSet(_pictures(40, seed=2), torch.arange(40) % 3)
    dataset = Dataset("pictures", images, images, ("a", "b", "c"), MEAN, STD)
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
    images = ImageSet(_pictures(40, seed=2), torch.arange(40) % 3)
    dataset = Dataset("pictures", images, images, ("a", "b", "c"), MEAN, STD)
    for options in ({}, {"flip": "none"}, {"flip": "alternating", "cutout": 8}):
        config = Config(part="PartOne", batch_size=20, seed=5, **options)
        planned, _ = make_plan(config, LaunchSpec(), World(), dataset, "", None)
        loader = TrainLoader(dataset, GlobalBatchSampler(40, batch_size=20, seed=5), **options)
        for epoch in (1, 2):
            planned.sampler.set_epoch(epoch)
            loader.sampler.set_epoch(epoch)
            for (one, _), (other, _) in zip(planned, loader, strict=True):
                assert torch.equal(one, other)


# --- GPUs ---


class _Devices(TorchDispatchMode):
    """Records of each operation on tensors, scalars aside, its name and devices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        self.seen.append((str(operation), {x.device.type for x in tensors}))
        return result


def _loaders_on_a_fake_gpu() -> Iterator[TrainLoader | EvaluationLoader]:
    images = ImageSet(torch.zeros(40, 32, 32, 3, dtype=torch.uint8), torch.zeros(40).long())
    dataset = Dataset("zeros", images, images, ("a",), MEAN, STD)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for flip in ("random", "alternating"):
            sampler = GlobalBatchSampler(40, batch_size=8, world_size=2)
            yield TrainLoader(dataset, sampler, flip=flip, cutout=8, device="cuda")
        yield EvaluationLoader(images, mean=MEAN, std=STD, batch_size=8, device="cuda")


def test_no_batch_on_a_gpu_waits_for_the_host():
    """After the first batch nothing is copied between host and GPU, and no value is read.

    ``nonzero``, a boolean index and ``item`` raise for fake tensors.
    """
    for loader in _loaders_on_a_fake_gpu():
        batches = iter(loader)
        next(batches)
        with _Devices() as record:
            rest = list(batches)
        assert len(rest) == 4
        assert all(tensor.device.type == "cuda" for batch in rest for tensor in batch)
        assert len(record.seen) > 20
        assert [one for one in record.seen if one[1] != {"cuda"}] == []


def test_pictures_look_real():
    """The generated pictures use the full scale, are not symmetric, and have edges.

    The tests above rely on this.
    """
    images = _pictures(20)
    assert int(images.min()) < 10
    assert int(images.max()) > 245
    assert not any(torch.equal(image, image.flip(1)) for image in images)
    edges = Image.fromarray(images[0].numpy()).filter(ImageFilter.FIND_EDGES)
    assert edges.getextrema()[0][1] > 50
