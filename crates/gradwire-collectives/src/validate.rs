//! Requests that cannot be right are refused before anything is sent.

use crate::{rotation, Algorithm, Collective, Dtype, Fill, Policy, ReduceOp, Request, Rotation, View};
use gradwire_core::{CHUNKS_MAX, CLASSES_MAX};

/// Checks `request` for a rank of a group of `world_size` ranks, packets of which have `chunk_bytes` bytes of payload.
///
/// # Errors
/// What is wrong, for [`crate::OpError::Invalid`].
pub(crate) fn validate(
    request: &Request,
    rank: u32,
    world_size: u32,
    chunk_bytes: usize,
) -> Result<(), String> {
    check_ranks(&request.collective, rank, world_size)?;
    check_sizes(request, rank, world_size as usize)?;
    check_transfers(largest_transfer(request, world_size as usize), chunk_bytes)?;
    check_aliases(request, rank)?;
    check_reduction(request)?;
    check_policy(request)?;
    check_tags(request)
}

fn check_ranks(collective: &Collective, rank: u32, world_size: u32) -> Result<(), String> {
    let (what, named) = match collective {
        Collective::Broadcast { root }
        | Collective::Reduce { root }
        | Collective::Gather { root }
        | Collective::Scatter { root } => ("root", Some(*root)),
        Collective::Send { to, .. } => ("receiver", Some(*to)),
        Collective::Receive { from, .. } => ("sender", *from),
        _ => return Ok(()),
    };
    match named {
        Some(named) if named >= world_size => Err(format!("{what} {named} in a group of {world_size} ranks")),
        Some(named) if named == rank && what != "root" => Err(format!("rank {rank} is its own {what}")),
        None if world_size == 1 => Err("a group of one rank has nobody to receive from".to_owned()),
        _ => Ok(()),
    }
}

fn check_sizes(request: &Request, rank: u32, world_size: usize) -> Result<(), String> {
    let (input, output) = (request.input.len(), request.output.len());
    let elem_bytes = request.dtype.bytes();
    if input % elem_bytes != 0 || output % elem_bytes != 0 {
        return Err(format!("{input} and {output} bytes are not whole elements of {:?}", request.dtype));
    }
    let (want_input, want_output) = match &request.collective {
        Collective::AllReduce { .. } => (output, output),
        Collective::Broadcast { .. } | Collective::Barrier => (input, output),
        Collective::AllGather => (input, rows(input, world_size)?),
        Collective::ReduceScatter => (rows(output, world_size)?, output),
        Collective::Reduce { root } => (input, if *root == rank { input } else { output }),
        Collective::Gather { root } => (input, if *root == rank { rows(input, world_size)? } else { output }),
        Collective::Scatter { root } => {
            (if *root == rank { rows(output, world_size)? } else { input }, output)
        }
        Collective::AllToAll { input_split_bytes: give, output_split_bytes: take } => {
            let totals = (splits(give, request, world_size)?, splits(take, request, world_size)?);
            let (own_give, own_take) = (give[rank as usize], take[rank as usize]);
            if own_give != own_take {
                return Err(format!("{own_give} bytes for rank {rank} itself, which expects {own_take}"));
            }
            totals
        }
        Collective::Send { .. } | Collective::Receive { .. } => (input, output),
    };
    if (input, output) != (want_input, want_output) {
        let got = format!("{input} bytes of input and {output} of output");
        return Err(format!("{got} where {want_input} and {want_output} fit each other"));
    }
    Ok(())
}

/// Whether a connection takes the largest transfer.
fn check_transfers(largest: usize, chunk_bytes: usize) -> Result<(), String> {
    if largest > TRANSFER_BYTES_MAX {
        return Err(format!("a transfer of {largest} bytes; at most {TRANSFER_BYTES_MAX} are possible"));
    }
    let most = chunk_bytes.saturating_mul(CHUNKS_MAX as usize);
    if largest > most {
        return Err(format!(
            "a transfer of {largest} bytes; the MTU is too small for it: packets with {chunk_bytes} bytes of \
             payload carry at most {most}"
        ));
    }
    Ok(())
}

fn rows(row: usize, world_size: usize) -> Result<usize, String> {
    row.checked_mul(world_size)
        .ok_or_else(|| format!("{world_size} rows of {row} bytes do not fit into memory"))
}

fn splits(splits: &[usize], request: &Request, world_size: usize) -> Result<usize, String> {
    if splits.len() != world_size {
        return Err(format!("{} split sizes in a group of {world_size} ranks", splits.len()));
    }
    if splits.iter().any(|bytes| bytes % request.dtype.bytes() != 0) {
        return Err(format!("split sizes {splits:?} are not whole elements of {:?}", request.dtype));
    }
    let total = splits.iter().try_fold(0_usize, |sum, bytes| sum.checked_add(*bytes));
    total.ok_or_else(|| format!("split sizes {splits:?} overflow"))
}

/// Bytes of the largest single transfer that the request leads to, about.
fn largest_transfer(request: &Request, world_size: usize) -> usize {
    let (input, output) = (request.input.len(), request.output.len());
    match &request.collective {
        Collective::AllReduce { algorithm: Algorithm::HalvingDoubling | Algorithm::ParameterServer } => {
            output
        }
        Collective::AllReduce { .. } => output.div_ceil(world_size).next_multiple_of(64),
        Collective::Broadcast { .. } | Collective::ReduceScatter | Collective::Scatter { .. } => output,
        Collective::AllGather | Collective::Reduce { .. } | Collective::Gather { .. } => input,
        Collective::AllToAll { input_split_bytes, output_split_bytes } => {
            input_split_bytes.iter().chain(output_split_bytes).copied().max().unwrap_or(0)
        }
        Collective::Barrier => 0,
        Collective::Send { .. } => input,
        Collective::Receive { .. } => output,
    }
}

/// Input and output may share memory only where the collective is made for it.
fn check_aliases(request: &Request, rank: u32) -> Result<(), String> {
    let Request { input, output, residual, .. } = request;
    let row = |view: &View, bytes: usize| view.part(&(rank as usize * bytes..(rank as usize + 1) * bytes));
    let allowed = match &request.collective {
        Collective::AllReduce { .. } | Collective::Broadcast { .. } => input.is(output),
        Collective::Reduce { root } if *root == rank => input.is(output),
        Collective::Gather { root } if *root == rank => input.is(&row(output, input.len())),
        Collective::Scatter { root } if *root == rank => output.is(&row(input, output.len())),
        Collective::AllGather => input.is(&row(output, input.len())),
        Collective::ReduceScatter => output.is(&row(input, output.len())),
        _ => false,
    };
    if input.overlaps(output) && !allowed {
        return Err("input and output overlap in a way that this collective does not allow".to_owned());
    }
    if residual.overlaps(input) || residual.overlaps(output) {
        return Err("the residual overlaps another view".to_owned());
    }
    Ok(())
}

fn check_reduction(request: &Request) -> Result<(), String> {
    let reduces = matches!(
        request.collective,
        Collective::AllReduce { .. } | Collective::ReduceScatter | Collective::Reduce { .. }
    );
    let Request { dtype, reduce, .. } = *request;
    if !reduces || dtype.supports(reduce) {
        return Ok(());
    }
    if reduce == ReduceOp::Avg && dtype.supports(ReduceOp::PremulSum(1.0)) {
        return Err(format!(
            "a mean of {dtype:?}: the sum that is divided may not fit; convert to int32 or wider, or take the sum"
        ));
    }
    Err(format!("{reduce:?} is not defined for {dtype:?}"))
}

fn check_tags(request: &Request) -> Result<(), String> {
    let class = request.tags.class;
    if usize::from(class) < CLASSES_MAX {
        return Ok(());
    }
    Err(format!("traffic class {class}: there are {CLASSES_MAX}"))
}

// claim: auto/exact-unless-asked
fn check_policy(request: &Request) -> Result<(), String> {
    let Request { policy, residual, output, .. } = request;
    let bytes = request.bucket_bytes();
    if !residual.is_empty() && residual.len() != bytes {
        return Err(format!("a residual of {} bytes for a bucket of {bytes}", residual.len()));
    }
    policy.validate()?;
    if *policy == Policy::RELIABLE || policy.is_exact() {
        return Ok(());
    }
    let algorithm = match request.collective {
        Collective::AllReduce { algorithm } => algorithm,
        Collective::ReduceScatter if policy.gather.may_lose() => {
            return Err(
                "a reduce-scatter sends no results that could be lost: gather_loss_bound = 0".to_owned()
            )
        }
        Collective::ReduceScatter if policy.rotation == Rotation::On => {
            return Err("a reduce-scatter is not rotated: hadamard off, or an all-reduce".to_owned())
        }
        Collective::ReduceScatter => Algorithm::Transpose,
        _ => return Err("only an all-reduce and a reduce-scatter may tolerate loss".to_owned()),
    };
    if algorithm == Algorithm::Ring && policy.gather.may_lose() {
        return Err(
            "a ring would hand on what fills the holes of results: take another schedule, or let no result be lost \
                    (gather_loss_bound = 0)"
                .to_owned(),
        );
    }
    if policy.gather.fill == Fill::Previous && request.input.is(output) && !output.is_empty() {
        return Err(
            "in place an output holds this rank's own values and no previous result: fill with zero or \
                    local, or give an output of its own"
                .to_owned(),
        );
    }
    if policy.rotation == Rotation::On && request.dtype == Dtype::F64 {
        return Err("float64 cannot be rotated: the transform sums in float32".to_owned());
    }
    if policy.rotation == Rotation::On && !rotation::can_fill(request) {
        return Err("a rotated reduction cannot fill in what another output held before".to_owned());
    }
    if !request.reduce.is_additive() || !request.dtype.is_float() {
        return Err(format!("{:?} of {:?} cannot tolerate loss", request.reduce, request.dtype));
    }
    Ok(())
}

/// Byte offsets in headers have 32 bits.
const TRANSFER_BYTES_MAX: usize = u32::MAX as usize;
