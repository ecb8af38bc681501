"""Wrong solutions of the lessons, each a small edit of a right one, and what it must be told."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WrongSolution:
    """A wrong solution.

    blanks : wrong texts by the number of the blank.
    edit : a text of the rest, and what takes its place.
    told : patterns that the message contains: the cause, and the audit's name where it has one.
    """

    name: str
    lesson: int
    told: tuple[str, ...]
    blanks: dict[int, str] = field(default_factory=dict)
    edit: tuple[str, str] = ("", "")

    def __str__(self):
        return f"{self.lesson}-{self.name}"


def of_lesson(number, table):
    """Return wrong solutions of a lesson: by name the blanks, then what each must be told."""
    return [
        WrongSolution(name, number, tuple(told), blanks) for name, (blanks, *told) in table.items()
    ]


AVERAGE = "            average(model)  # new in lesson 3\n"
BACKWARD = "            loss.backward()\n"
SHRINK = (
    "            with torch.no_grad():\n"
    "                for p in model.parameters():\n"
    "                    p.mul_(0.999)\n"
)
STEP = "            optimizer.step()\n"
LOSS_LINE = "            loss = nn.functional.cross_entropy(model(images), labels)\n"
LOSS = "cross_entropy(model(images), labels)"
WEIGHTS_IN_THE_LOOP = (
    "            for p in model.parameters():\n"
    "                dist.all_reduce(p.data)\n"
    "                p.data /= dist.get_world_size()\n"
)

ALL_REDUCE = "[dist.all_reduce(p.grad.div_(dist.get_world_size())) for p in model.parameters()]"
EPOCH_ON_RANK_0 = "        dist.get_rank() or loader.sampler.set_epoch"
# Lesson 5, between the cut into chunks and the first loop.
ADD_UP = "    for step in range(size - 1):  # add up\n"
COPY_BACK = (
    "    means = (flat / size).split([gradient.numel() for gradient in gradients])\n"
    "    return [own.copy_(mean.view_as(own)) for own, mean in zip(gradients, means)]\n"
)
WHOLE_TENSORS = (
    "    leaving = flat.clone()\n"
    "    for _ in range(size - 1):\n"
    "        arriving = torch.empty_like(flat)\n"
    "        exchange(leaving, arriving)\n"
    "        flat += arriving\n"
    "        leaving = arriving\n"
)
STRAIGHT_TO_ALL = (
    "    others = [other for other in range(size) if other != rank]\n"
    "    parts = [torch.empty_like(chunks[rank]) for _ in others]\n"
    "    sent = [dist.isend(chunks[other].clone(), other) for other in others]\n"
    "    [dist.recv(part, other) for part, other in zip(parts, others)]\n"
    "    chunks[rank].add_(sum(parts))\n"
    "    sent += [dist.isend(chunks[rank].clone(), other) for other in others]\n"
    "    [dist.recv(chunks[other], other) for other in others]\n"
    "    [work.wait() for work in sent]\n"
)
FIXED_SHARES = (
    "    data = torch.utils.data.Subset(data, range(rank, len(data), size))\n"
    "    return DataLoader(data, ..., shuffle=True)"
)
BEGIN_MEASURING = (
    "    average_gradients(model)\n"
    "    dist.barrier()  # all begin together\n"
    "    began = time.perf_counter()\n"
)
MEASURED_WITH_THE_FIRST = (
    "    dist.barrier()  # all begin together\n"
    "    began = time.perf_counter()\n"
    "    average_gradients(model)\n"
)

# That each pattern of the rules has its name, tests/lab/evidence proves: one of them reaches a
# student here, "literal 2".
LESSON_3 = [
    WrongSolution(
        "weights",
        3,
        ("the weights are averaged in place of the gradients", "weights-averaged"),
        {
            0: "dist.gather(parameter.data, arriving, dst=0)",
            2: "dist.scatter(parameter.data, means, src=0)",
        },
    ),
    WrongSolution(
        "copy",
        3,
        ("a copy gets it", "own-gradient"),
        {2: "dist.scatter(parameter.grad.clone(), means, src=0)"},
    ),
    WrongSolution(
        "only rank 0",
        3,
        ("the mean comes to rank 0 only", "own-gradient"),
        {2: "rank == 0 and parameter.grad.copy_(means[0])"},
    ),
    WrongSolution(
        "after the step",
        3,
        ("own gradient .*before optimizer.step", "own-gradient"),
        edit=(AVERAGE + STEP, STEP + AVERAGE),
    ),
    WrongSolution("never", 3, ("exchange nothing", "group-unused"), edit=(AVERAGE, "")),
    WrongSolution(
        "another function",
        3,
        ("exchange nothing", "group-unused"),
        edit=("train(average_gradients)", "train(lambda model: None)"),
    ),
    WrongSolution(
        "before backward",
        3,
        ("exchange nothing", "after loss.backward"),
        edit=(BACKWARD + AVERAGE, AVERAGE + BACKWARD),
    ),
    WrongSolution(
        "every other step",
        3,
        ("step 1: .* own rank's gradient .in 29 of 58 steps", "own-gradient"),
        edit=(AVERAGE, "            len(losses) % 2 or average(model)\n"),
    ),
    WrongSolution(
        "weights in the loop",
        3,
        ("the weights are averaged, not the gradients", "weights-averaged"),
        edit=(AVERAGE + STEP, STEP + WEIGHTS_IN_THE_LOOP),
    ),
    WrongSolution(
        "literal 2",
        3,
        ("divided by 2, not by", "1.500 times the mean on 3 ranks", "literal-divisor"),
        {1: "[sum(arriving) / 2] * size"},
    ),
    WrongSolution("nothing comes back", 3, ("nothing brings it back",), {2: "pass"}),
    WrongSolution(
        "last left out",
        3,
        ("left out: 1.bias:", "some-parameters"),
        edit=("model.parameters()", "list(model.parameters())[:-1]"),
    ),
    WrongSolution(
        "biases left out",
        3,
        ("left out: 0.bias and 1.bias:", "some-parameters"),
        edit=("if parameter.grad is None", "if parameter.grad is None or parameter.dim() < 2"),
    ),
    WrongSolution("gone", 3, ("a gradient that is None",), {2: "parameter.grad = None"}),
    WrongSolution(
        "other weights",
        3,
        ("start from different weights", "different-start"),
        edit=("torch.manual_seed(0)", "torch.manual_seed(dist.get_rank())"),
    ),
    WrongSolution(
        "same samples",
        3,
        ("train on the same samples", "same-samples"),
        edit=("rank=rank, seed=0", "rank=0, seed=0"),
    ),
    WrongSolution(
        "one order",
        3,
        ("same order", "same-order"),
        edit=("        loader.sampler.set_epoch(epoch)\n", ""),
    ),
    WrongSolution(
        "batch",
        3,
        ("192 samples instead of 64", "wrong-global-batch"),
        edit=("GLOBAL_BATCH // size, sampler", "GLOBAL_BATCH, sampler"),
    ),
    WrongSolution(
        "no zero_grad",
        3,
        ("was not cleared.*zero_grad", "gradients-pile-up"),
        edit=("            optimizer.zero_grad()\n", ""),
    ),
    WrongSolution("no step", 3, ("weights never change",), edit=(STEP, "")),
    WrongSolution(
        "weights shrunk",
        3,
        ("after step 1 the weights are not what",),
        edit=(STEP, STEP + SHRINK),
    ),
    WrongSolution(
        "gradients cleared again",
        3,
        ("not a weighted sum", "average alone"),
        edit=(STEP, "            next(model.parameters()).grad.zero_()\n" + STEP),
    ),
    WrongSolution("two updates", 3, (r"optimizer\.step\(\)",), edit=(STEP, STEP + STEP)),
    WrongSolution(
        "scaled loss",
        3,
        ("the loss is divided by", "scaled-in-loss"),
        edit=(LOSS, f"{LOSS} / dist.get_world_size()"),
    ),
    WrongSolution(
        "learning rates",
        3,
        ("rank 1: 0.2", "different-learning-rates"),
        edit=("lr=LEARNING_RATE", "lr=LEARNING_RATE * (1 + dist.get_rank())"),
    ),
    WrongSolution(
        "another model",
        3,
        ("other parameters than those of the model",),
        edit=("SGD(model.parameters()", "SGD(build_model().parameters()"),
    ),
    WrongSolution(
        "not joined",
        3,
        ("never calls init_process_group",),
        edit=('    dist.init_process_group("gloo")\n', ""),
    ),
    WrongSolution(
        "a name",
        3,
        (
            r"average_gradients\(a Sequential\) fails in line \d+ of \S+ \(means = ",
            "NameError: .*'ariving'",
        ),
        {1: "[sum(ariving) / size] * size"},
    ),
    WrongSolution(
        "all_reduce",
        3,
        (r"on 3 ranks, rank 0 calls all_reduce 4 times\. This lesson averages with dist.gather",),
        {0: "dist.all_reduce(parameter.grad)", 2: "parameter.grad /= size"},
    ),
    WrongSolution(
        "all_gather",
        3,
        (r"calls all_gather 4 times",),
        {
            0: "every = [torch.empty_like(parameter.grad) for _ in range(size)]",
            1: "dist.all_gather(every, parameter.grad)",
            2: "parameter.grad.copy_(sum(every) / size)",
        },
        ("if rank == 0 else None  # a list", "# a list"),
    ),
    WrongSolution(
        "broadcast",
        3,
        ("calls gather 4 times, broadcast 4 times",),
        {2: "rank or parameter.grad.copy_(means[0]); dist.broadcast(parameter.grad, 0)"},
    ),
    WrongSolution(
        "root 1",
        3,
        (r"rank 0 sends 1 times .* with gather and 0 times with scatter, not 0 and 2.*dst=0",),
        {
            0: "dist.gather(parameter.grad, arriving, dst=1)",
            2: "dist.scatter(parameter.grad, means, src=1)",
        },
        ("rank == 0 else", "rank == 1 else"),
    ),
    WrongSolution(
        "gathers twice",
        3,
        (r"rank 1 sends 2 times the gradients' size with gather",),
        {0: "[dist.gather(parameter.grad, arriving, dst=0) for _ in range(2)]"},
    ),
    WrongSolution(
        "another average",
        3,
        (r"the program trains without it: on 3 ranks, rank 0 calls all_reduce, and not gather",),
        edit=("train(average_gradients)", f"train(lambda model: {ALL_REDUCE})"),
    ),
    WrongSolution(
        "epoch on rank 0",
        3,
        ("epoch 2: the ranks draw 1,401 different samples", "uneven-coverage"),
        edit=("        loader.sampler.set_epoch", EPOCH_ON_RANK_0),
    ),
    WrongSolution(
        "a name at the end",
        3,
        (r"the program fails in line \d+ of \S+ \(print.*NameError: .*'loss'",),
        edit=("loss {losses[0]", "loss {loss[0]"),
    ),
]

OTHERS = [
    WrongSolution("no zero_grad", 1, ("begins with forward, backward, step",), {1: "pass"}),
    WrongSolution(
        "no step", 1, ("begins with forward, zero_grad, backward, forward",), {3: "pass"}
    ),
    WrongSolution("no difference", 1, ("section forward takes ",), {0: "time.perf_counter()"}),
    WrongSolution(
        "step in backward",
        1,
        ("section backward takes 1110 s",),
        {2: "loss.backward(), optimizer.step()", 3: "pass"},
    ),
    WrongSolution(
        "another model",
        1,
        ("other parameters than those of the model",),
        edit=("SGD(model.parameters()", "SGD(build_model().parameters()"),
    ),
    WrongSolution(
        "twice the loss", 1, ("backward computes 2.000 times",), {2: "(2 * loss).backward()"}
    ),
    WrongSolution(
        "a name", 1, (r"train\(1\) fails in line \d+ of \S+ \(los", "'los'"), {2: "los.backward()"}
    ),
    WrongSolution(
        "other weights",
        2,
        ("start from different weights", "different-start"),
        {0: "dist.get_rank()"},
    ),
    WrongSolution(
        "rank 0's share",
        2,
        ("1797 samples in epoch 1, 599 different ones of 1797", "same-samples"),
        {2: "0"},
    ),
    WrongSolution(
        "all samples", 2, ("take 5391 samples in epoch 1", "same-samples"), {1: "1", 2: "0"}
    ),
    WrongSolution(
        "batch",
        2,
        ("192 samples instead of 64", "wrong-global-batch"),
        {3: "GLOBAL_BATCH"},
    ),
    *of_lesson(
        2,
        {
            "epoch on rank 0": (
                {4: "dist.get_rank() or loader.sampler.set_epoch(epoch)"},
                "take 1797 samples in epoch 2, 1401 different",
                "uneven-coverage",
            ),
            "epoch times rank": (
                {4: "loader.sampler.set_epoch(epoch * (dist.get_rank() + 1))"},
                "samples in epoch 2",
                "the same number",
            ),
            "two orders": (
                {4: "loader.sampler.set_epoch(epoch % 2)"},
                "rank 0's epoch 3 is its epoch 1",
                "same-order",
            ),
            "the last rank's batch": (
                {3: "GLOBAL_BATCH // size * (1 + rank // (size - 1))"},
                "different numbers of batches",
                "different-batch-counts",
            ),
        },
    ),
    WrongSolution(
        "epoch in the loop",
        2,
        ("epoch 2 is its epoch 1", "before its first batch"),
        {4: "pass"},
        (LOSS_LINE, f"            loader.sampler.set_epoch(epoch)\n{LOSS_LINE}"),
    ),
    WrongSolution(
        "averages",
        2,
        ("on 3 ranks, rank 0 calls all_reduce", "send nothing"),
        edit=(STEP, f"            {ALL_REDUCE}\n{STEP}"),
    ),
    WrongSolution(
        "shares that stay",
        2,
        ("no DistributedSampler gives out samples",),
        {4: "pass"},
        edit=("    return DataLoader(data, ..., sampler=sampler)", FIXED_SHARES),
    ),
    WrongSolution("no epoch", 2, ("set_epoch", "same-order"), {4: "pass"}),
    WrongSolution(
        "epoch 0 forever", 2, ("set_epoch", "same-order"), {4: "loader.sampler.set_epoch(0)"}
    ),
    WrongSolution(
        "no sampler",
        2,
        ("train on the same samples", "same-samples"),
        {4: "pass"},
        edit=("sampler=sampler)  # all", "shuffle=False)  # all"),
    ),
    WrongSolution(
        "no zero_grad",
        2,
        ("was not cleared.*zero_grad", "gradients-pile-up"),
        edit=("            optimizer.zero_grad()\n", ""),
    ),
    WrongSolution("no step", 2, ("weights never change",), edit=(STEP, "")),
    *of_lesson(
        4,
        {
            "bytes": (
                {0: "2 * (nodes - 1) * gradient_mb / 1000 / rate_gbit"},
                "0.125 times what rank 0's link",
                "Bytes are taken for bits",
            ),
            "in alone": (
                {0: "(nodes - 1) * gradient_mb * 8 / 1000 / rate_gbit"},
                "gives 0.8861 s, 0.5 times",
                "one direction",
            ),
            "rank 0 to itself": (
                {0: "2 * nodes * gradient_mb * 8 / 1000 / rate_gbit"},
                "1.33 times",
                "nothing to itself",
            ),
            "nothing": ({0: "None"}, r"exchange_seconds\(4, 36.92, 1.0\) returns None"),
            "a name": (
                {0: "2 * (nodes - 1) * gradient * 8 / 1000 / rate_gbit"},
                r"exchange_seconds\(4, 36.92, 1.0\) fails in line \d+ of \S+ \(return .*NameError",
            ),
        },
    ),
    WrongSolution(
        "the first counts",
        4,
        (r"measure\(0.04, 3\) returns 1.33 s, and must return 1 s",),
        edit=(BEGIN_MEASURING, MEASURED_WITH_THE_FIRST),
    ),
    WrongSolution("not divided", 4, ("returns 3 s",), edit=("began) / steps", "began)")),
    WrongSolution("bits", 4, ("returns 0.1 s",), edit=("1e6 / 4 / 1000", "1e6 / 40 / 1000")),
    WrongSolution(
        "all_reduce",
        5,
        (r"on 3 ranks, rank 0 calls all_reduce 1 time\. .*isend",),
        edit=(ADD_UP, f"    dist.all_reduce(flat)\n{COPY_BACK}{ADD_UP}"),
    ),
    WrongSolution(
        "whole tensors",
        5,
        ("sends 2 messages, 2 of them to the next rank, with 2 times .* A ring sends 4",),
        edit=(ADD_UP, f"{WHOLE_TENSORS}{COPY_BACK}{ADD_UP}"),
    ),
    WrongSolution(
        "straight to all",
        5,
        ("sends 4 messages, 2 of them to the next rank, with 1.33 times",),
        edit=(ADD_UP, f"{STRAIGHT_TO_ALL}{COPY_BACK}{ADD_UP}"),
    ),
    *of_lesson(
        5,
        {
            "always rank's chunk": ({0: "rank"}, "the first loop"),
            "adds to its own": ({1: "rank - step"}, "the first loop"),
            "passes on too early": ({2: "rank - step", 3: "rank - step - 1"}, "the second loop"),
            "wrong way": ({0: "rank + step", 1: "rank + step + 1"}, "the first loop"),
        },
    ),
    WrongSolution(
        "literal 2", 5, ("divided by 2", "literal-divisor"), edit=("flat /= size", "flat /= 2")
    ),
    WrongSolution(
        "another function",
        5,
        ("exchange nothing", "group-unused"),
        edit=('["train"](average_gradients)', '["train"](lambda model: None)'),
    ),
    *of_lesson(
        6,
        {
            "never sent": (
                {0: "-1"},
                r"ready\(\d, a tensor of shape \(5,\)\) fails",
                "Something is None",
            ),
            "not awaited": ({2: "pass"}, "before its sum has arrived"),
            "waits for the last": (
                {2: "self.under_way[-1][2].wait()"},
                "on 2 ranks a bucket is divided",
                "before its sum has arrived",
            ),
            "waits for the first": (
                {2: "self.under_way[0][2].wait()"},
                "before its sum has arrived",
            ),
            "a barrier": ({2: "dist.barrier()"}, "before its sum has arrived"),
            "literal 2": ({3: "2"}, "divided by 2", "literal-divisor"),
            "counted as 0": ({4: "0"}, "step 1 is right, and in step 2"),
            "counted as 1": ({4: "1"}, "ready"),
            "waits at once": (
                {1: "dist.all_reduce(flat)", 2: "pass"},
                "sent 8, and 0 were under way",
            ),
        },
    ),
    *of_lesson(
        7,
        {
            "one less": (
                {1: "sum((v - mean) ** 2 for v in values) / (len(values) - 1)"},
                "not by one less",
            ),
            "a constant batch": (
                {2: "(value - mean) / variance**0.5"},
                r"normalise\(\[2.0, 2.0\]\) fails in line \d+ .*ZeroDivisionError",
            ),
            "after the root": ({2: "(value - mean) / (variance**0.5 + 1e-5)"}, "not to its root"),
            "no root": (
                {2: "(value - mean) / (variance + 1e-5)"},
                "the root of the variance, not by",
            ),
            "no numbers": ({2: "print(value)"}, r"normalise\(.*returns \[None"),
            "last shard alone": (
                {3: "gradient.copy_(part / shards)"},
                "every rank gets rank 3's gradient",
                "with \\+=",
            ),
            "sum": ({3: "gradient += part"}, "4 shards .* never divided"),
            "literal 4": ({3: "gradient += part / 4"}, "1 shard .* divided by 4, not by"),
            "lost": ({3: "gradient = gradient + part / shards"}, "it is zero, nothing was added"),
        },
    ),
    *of_lesson(
        8,
        {
            "not called": ({0: "pass"}, "called it 3 times", "Nothing calls step"),
            "readings": ({1: "clock()"}, "returns 40 values", "readings of the clock"),
            "whole seconds": ({1: "round(clock() - began)"}, r"\[1, 10, 2\] as numbers 20 to 22"),
            "literal places": ({2: "13", 3: "27"}, r"median_interval\(.* fails in line"),
            "narrow": ({2: "math.floor(n / 2 - 0.5 * n**0.5)"}, "91.8 % hold", "numbers 16 and 27"),
            "rounded up": ({2: "math.ceil(n / 2 - 0.98 * n**0.5)"}, "numbers 14 and 27"),
            "no number": (
                {2: "n / 2 - 0.98 * n**0.5"},
                r"median_interval\(\[.*\) fails in line \d+ .*TypeError",
            ),
        },
    ),
    WrongSolution(
        "one clock",
        8,
        ("All are equal: one clock around all steps",),
        edit=("    return seconds\n", "    return [sum(seconds) / steps] * steps\n"),
    ),
    WrongSolution(
        "late steps cut",
        8,
        (r"\[1.046875, 2.0, 1.578125\] as numbers 20 to 22, not \[1.046875, 10.0",),
        edit=("seconds.append(...)", "seconds.append(min(..., 2.0))"),
    ),
    WrongSolution(
        "the mean",
        8,
        ("the middle is 29.5, and must be 20.5, the median. That is the mean",),
        edit=("(values[(n - 1) // 2] + values[n // 2]) / 2", "sum(values) / n"),
    ),
    WrongSolution(
        "not sorted", 8, ("hold the true median",), edit=("sorted(seconds)", "list(seconds)")
    ),
    *of_lesson(
        10,
        {
            "always 1": ({0: "1 if any(gave_up) else None"}, "find_culprit returns 1, and must 0"),
            "who complains": (
                {0: "gave_up.index(True) if any(gave_up) else None"},
                "find_culprit returns 1, and must 0",
            ),
            "never none": ({0: "gave_up.index(False)"}, "find_culprit returns 0, and must None"),
            "half an hour": ({4: "1800"}, "limit is 1800 s"),
        },
    ),
]

# Lesson 7's second step: blanks 4 to 9 are forward's, 10 to 15 backward's.
ONES = "torch.ones_like(x)"
BATCHNORM = of_lesson(
    7,
    {
        "no message": ({5: "pass"}, "count", "own sums", "No rank sends"),
        "a copy is sent": ({5: "dist.all_reduce(sums.clone())"}, "count", "own sums", "use `sums`"),
        "summed on rank 0": ({5: "dist.reduce(sums, 0)"}, "rank [12]'s count"),
        "sent twice": (
            {5: "dist.all_reduce(sums), dist.all_reduce(sums)"},
            "add up their sums twice",
        ),
        "averaged": ({5: "dist.all_reduce(sums, dist.ReduceOp.AVG)"}, "mean of the ranks' counts"),
        "equal counts": ({6: "len(x) * dist.get_world_size()"}, "count.*unequal"),
        "ranks": ({6: "dist.get_world_size()"}, "number of ranks, not of values"),
        "mean of means": (
            {
                4: f"torch.stack([{ONES}.sum(0), x.mean(0), (x**2).mean(0)])",
                7: "sums[1] / dist.get_world_size()",
            },
            r"rank 0's mean\[",
            "mean of the ranks' means",
        ),
        "sum of means": ({7: "sums[1]"}, "sum"),
        "mean by own count": ({7: "sums[1] / len(x)"}, "this rank's own count"),
        "own mean": ({7: "x.mean(0)"}, r"rank 0's mean\[", "own sums alone"),
        "mean of variances": (
            {
                4: f"torch.stack([{ONES}.sum(0), x.sum(0), x.var(0, correction=0)])",
                8: "sums[2] / dist.get_world_size()",
            },
            r"rank 0's variance\[",
            "mean of the ranks' variances, each",
            r"x\*\*2",
        ),
        "mean of torch's variances": (
            {
                4: f"torch.stack([{ONES}.sum(0), x.sum(0), x.var(0)])",
                8: "sums[2] / dist.get_world_size()",
            },
            "mean of the ranks' variances, divided by one less",
        ),
        "weighted mean of variances": (
            {
                4: f"torch.stack([{ONES}.sum(0), x.sum(0), len(x) * x.var(0, correction=0)])",
                8: "sums[2] / count",
            },
            "weighted by count",
        ),
        "own variance": ({8: "x.var(0, correction=0)"}, "own sums alone"),
        "no mean subtracted": ({8: "sums[2] / count"}, r"subtract mean\*\*2"),
        "mean subtracted": ({8: "sums[2] / count - mean"}, r"subtract mean\*\*2, not"),
        "deviation": ({8: "(sums[2] / count - mean**2) ** 0.5"}, "standard deviation"),
        "variance by own count": ({8: "sums[2] / len(x) - mean**2"}, "own count"),
        "one less in both": (
            {8: "(sums[2] / count - mean**2) * count / (count - 1)", 9: "variance"},
            r"rank 0's variance\[",
            "one less than the number",
        ),
        "float32": (
            {4: f"torch.stack([{ONES}, x, x**2]).sum(1)"},
            "around 1,000 in float32",
            r"x\.double\(\)",
        ),
        "doubled too late": (
            {4: f"torch.stack([{ONES}, x, x**2]).double().sum(1)"},
            "around 1,000 in float32",
            r"x\.double\(\)",
        ),
        "N in the running variance": ({9: "variance"}, r"rank 0's running_variance\[", "one less"),
        "own N in the running variance": (
            {9: "variance * len(x) / (len(x) - 1)"},
            "running_variance",
            "this rank's own",
        ),
        "squares alone by one less": (
            {9: "sums[2] / (count - 1) - mean**2"},
            r"running_variance.*the mean of x\*\*2 alone",
        ),
        "means of g": (
            {
                13: "torch.stack([grad_bias, grad_weight]) / len(x)",
                15: "weight / std * (g - (sums[0] + z * sums[1]) / dist.get_world_size())",
            },
            "the ranks send means, not sums",
        ),
        "a number": ({7: "1.5"}, "returns 1.5 as mean", r"shape \(2,\)"),
        "one sum": ({4: "x.sum(0)[:1]"}, "fails in line", "IndexError"),
        "own z": (
            {10: "(x - x.mean(0)) / std"},
            r"rank 0's grad_x\[",
            "z is made with this rank's own mean$",
        ),
        "own z and deviation": (
            {10: "(x - x.mean(0)) / (x.var(0, correction=0) + 1e-5) ** 0.5"},
            "own mean and deviation",
        ),
        "no message in backward": ({14: "pass"}, "grad_x", "own sums", "No rank sends"),
        "sent twice in backward": (
            {14: "dist.all_reduce(sums), dist.all_reduce(sums)"},
            "grad_x",
            "add up their sums twice",
        ),
        "no second term": (
            {15: "weight / std * (g - sums[0] / count)"},
            r"- z \* sum\(g \* z\) / count is missing: each x moves the deviation",
        ),
        "no first term": (
            {15: "weight / std * (g - z * sums[1] / count)"},
            r"- sum\(g\) / count is missing: each x moves the mean",
        ),
        "neither term": ({15: "weight / std * g"}, "moves the mean.*; .*moves the deviation"),
        "own count in backward": (
            {15: "weight / std * (g - sums[0] / len(x) - z * sums[1] / len(x))"},
            "divided by this rank's own count",
        ),
        "no count": ({15: "weight / std * (g - sums[0] - z * sums[1])"}, "not divided by `count`"),
        "added": (
            {15: "weight / std * (g + sums[0] / count + z * sums[1] / count)"},
            r"sum\(g\) / count is added.*; z \* .* is added",
        ),
        "no z": ({15: "weight / std * (g - (sums[0] + sums[1]) / count)"}, "not multiplied by z"),
        "no weight": (
            {15: "(g - sums[0] / count - z * sums[1] / count) / std"},
            "weight is missing",
        ),
        "variance for std": (
            {15: "weight / variance * (g - sums[0] / count - z * sums[1] / count)"},
            "by the variance, not by std",
        ),
        "all ranks' gradients": (
            {14: "dist.all_reduce(sums); grad_bias, grad_weight = sums"},
            r"rank 0's grad_weight\[",
            "sum over all ranks, and would count 3 times",
        ),
        "sent in place": (
            {
                13: "grad_bias, grad_weight",
                14: "dist.all_reduce(sums[0]), dist.all_reduce(sums[1])",
            },
            r"rank 0's grad_weight\[",
            "sum over all ranks.*from before the message",
        ),
        "bias alone": (
            {14: "dist.all_reduce(sums); grad_bias = sums[0]"},
            r"rank 0's grad_bias\[",
            "sum over all ranks, and would count 3 times",
        ),
        "swapped": (
            {11: "g.sum(0)", 12: "(g * z).sum(0)", 13: "torch.stack([grad_weight, grad_bias])"},
            r"rank 0's grad_weight\[",
            "it is grad_bias",
        ),
        "gradient of z": (
            {11: "(g * x).sum(0)", 13: "torch.stack([grad_bias, (g * z).sum(0)])"},
            "grad_weight",
            r"take the sum of g \* z",
        ),
    },
)
LATER = [
    WrongSolution(
        "cleared before the step",
        2,
        ("rank 0's weights never change", "zero_grad"),
        edit=(
            "optimizer.zero_grad()\n            loss.backward()",
            "loss.backward()\n            optimizer.zero_grad()",
        ),
    ),
    WrongSolution(
        "divided before the sum is there",
        6,
        ("was divided before it arrived", "sum-not-mean"),
        {2: "flat.div_(dist.get_world_size()); work.wait()", 3: "1"},
    ),
    WrongSolution(
        "its own number of calls to warm up",
        8,
        ("calls step\\(\\) 43 times, and must 45",),
        edit=("range(warmup)", "range(3)"),
    ),
    WrongSolution(
        "only if two gave up",
        10,
        ("returns None, and must 0, if the last lines of 2",),
        {0: "gave_up.index(False) if sum(gave_up) == 2 else None"},
    ),
    WrongSolution(
        "the shortest text",
        10,
        ("find_culprit returns",),
        {0: "min(range(len(printed)), key=lambda r: len(printed[r])) if any(gave_up) else None"},
    ),
]
DDP = [
    *of_lesson(
        11,
        {
            "not wrapped": ({0: "build_model()"}, "line 46 of 11_ddp.py.*no_sync"),
            "every micro-batch": (
                {1: "contextlib.nullcontext()"},
                "143 messages come too early, 48 with the last",
                "needless-communication",
            ),
            "the sum": ({2: "1"}, "on 2 ranks.*the first step's gradient is 4 times"),
            "the world size": ({2: "dist.get_world_size()"}, "on 2 ranks.* gradient is 2 times"),
            "a literal": ({2: "2"}, "MICRO_BATCHES = 4, the first step's gradient is 2 times"),
            "all write": ({3: "True"}, "2 ranks write the checkpoint"),
            "nobody writes": ({3: "False"}, "0 ranks write the checkpoint"),
            "DDP's names": ({4: "model.state_dict()"}, "module.0.weight", "attribute `module`"),
            "other weights": (
                {4: "build_model().state_dict()"},
                "the checkpoint holds other weights",
            ),
        },
    ),
    WrongSolution(
        "the learning rate in place of the loss",
        11,
        ("the first step's gradient is 4 times",),
        {2: "1"},
        ("lr=LEARNING_RATE", "lr=LEARNING_RATE / MICRO_BATCHES"),
    ),
    WrongSolution(
        "beside DDP",
        11,
        ("DDP never sends", "own-gradient"),
        edit=("cross_entropy(model(images)", "cross_entropy(model.module(images)"),
    ),
    WrongSolution(
        "no step",
        11,
        (r"optimizer.step\(\) is never called",),
        edit=("number % MICRO_BATCHES == 0  #", "False  #"),
    ),
    WrongSolution(
        "the gradients pile up",
        11,
        ("is each step's gradient forgotten",),
        edit=("optimizer.zero_grad()", "pass"),
    ),
]
