"""The probe: it watches a training script from within. Standard library and torch only.

``hook/sitecustomize.py`` loads this package when Python starts; ``install`` then patches torch when
the script imports it. The probe adds no collective, draws no random number and changes no tensor.
Each process writes what it sees to files of its own in the folder of the run, at once, so that
nothing is lost when the process is killed:

``<pid>.jsonl``
    One record a line: ``{"k": kind, "t": seconds of time.monotonic(), ...}``.
``<pid>.f64``
    Numbers in float64. A record refers to them with ``[offset, count]`` in numbers, not bytes.

Of each parameter the probe keeps the same 512 coordinates on every rank and in every step (all, if
there are fewer), see ``coordinates.py``. "Samples of the parameters" below are these numbers of
all parameters of an optimiser, in the order of its ``params`` records.

The kinds, with their fields ("at" is [file, line, text of the line] of the script, or null):

======== ==========================================================================================
start    pid, ppid, argv, python, torch (null before its import: see ``torch``), hint (the rank that
         the command was started for, or null), variables (RANK, LOCAL_RANK, WORLD_SIZE where set),
         forked_from (pid or null)
torch    version; torch has been imported
trouble  text (traceback): the probe itself failed in one place, and the script went on
group    init_process_group: rank, world, backend, at
ddp      DistributedDataParallel was built: parameters, bytes, at
fsdp     fully_shard or FSDP1: version, at
params   new parameters of optimiser o: optimizer (class), built (step at which the probe first saw
         the optimiser), rows [[key, name, shape, dtype, numel, offset, length, serial]]: key is
         "o.group.index", the rank holds [offset, offset + length) of the flat parameter (all of it,
         unless it is sharded), serial is the tensor's own, whichever optimiser holds it. Of a
         sharded parameter (FSDP2), weights, got and sent hold only those of its fixed coordinates
         that lie in this range, in order; own holds all of them. Length 0: the shard is no range,
         and nothing of it is kept
weights  before the first training forward after ``step`` steps of optimiser o: o, step, values
         (samples); written at the first backward after it, for step 0 after ``params``
backward step (as Probe.step counts), micro (number of this backward in the step, from 0), forwards
         [[samples, input_hash, through ("ddp", "module" or "bypass": a module that DDP has wrapped,
         but not through DDP), class]], one if model.forward() is called directly, loss {value,
         node, reduction, arriving, samples, target_hash} or null (arriving: the gradient that
         reaches the loss node, added up if there are several), synced (whether DDP was to average
         after its latest forward; null without DDP), seconds, exposed_seconds (from this rank's
         last gradient to the end of backward), at
step     before the optimiser's update: o, step (from 0), optimizer, micro (backwards since the last
         step), own (samples: this rank's own gradients, added up since .grad was last cleared; 0
         where none arrived, NaN where nobody knows), got (samples of what the optimiser gets), sent
         (samples of .grad when the first collective after the last backward began; null without
         one), own_norm and got_norm (over all parameters, in full; own_norm is null with several
         backwards, got_norm if parameters are sharded), lr [per group], settings {name: value of
         the first group}, scale (of GradScaler, or 1), clips [[kind "norm" or "value", limit, total
         norm or null, collectives before it in this step, at]], at
stepped  after the update: o, step, seconds (of the update), state (hash of samples of the
         optimiser's state; null if it has none)
loader   l (its number), dataset, length, batch_size, batches, sampler, replicas, inner_length,
         content (hash of what the innermost dataset holds as attributes, or null), at
batch    given to the script: l, epoch (iterations over l so far, from 0), b, indices (of the
         sampler)
items    rows [[outer index, index that reached the innermost dataset or null, label or null,
         hash or null]], l; from the process that fetched them. Indices of the n-th innermost
         dataset of a ConcatDataset begin at n * 2**40. None for iterable datasets
rest     l, epoch, indices: what the script would still have been given after the cut (null if
         endless), inner: the innermost index of each, or null
trained  a backward or an update followed a batch of this iteration over l: l, epoch (once for each)
epoch    an iteration over l ended: l, epoch, batches, cut
join     the script entered torch.distributed's Join: at
call     a collective began: c, name, op, size (of its group), group (null for all ranks, else its
         [name, ranks]), bytes (that this rank gives, or gets if it gives none), dtype and shape (of
         the first tensor), tensors (their number), step, peer (src, dst or null), async, content
         ("gradient", "weights" or "other"), within ("forward" if a model's that trains is under
         way, "backward" or null), at. init_process_group and new_group are calls as well; that of
         init_process_group has world (the number of ranks that it waits for, or null)
done     c, seconds (until the call returned), error (null unless it failed); a second record after
         an asynchronous call's Work.wait, with seconds 0 and wait_seconds
mesh     a DeviceMesh was built, so some communication may not be seen: at
eval     first forward without gradients after ``step`` steps: step, buffers [[name, samples as a
         list]], batchnorm (number of BatchNorm layers), at
random   a training forward with active dropout: step, hash (of the generator's state)
stack    why, busy (share of a core that this process used in the last half second), threads [[name,
         [[file, line, function, text]]]]: the script's frames, and the innermost one last; written
         by every rank each time that the file "dump" in the folder is touched
clock    only with clocks, see clocks.py
replay   only with replay: steps [[step, relative difference, parameter]], why_not
cut      step, why
error    type, message, traceback, at, after_cut
end      the process ends in good order: status, after_cut
======== ==========================================================================================
"""

from .state import ENVIRONMENT, install

__all__ = ["ENVIRONMENT", "install"]
