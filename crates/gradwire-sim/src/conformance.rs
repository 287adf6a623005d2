//! One list of calls, written down as text, that every driver must get right: the simulator and real sockets run the
//! same file and are compared with the same closed formulas.
//!
//! ```text
//! # collective [schedule | root | from to]  dtype  reduction  elems
//! all_reduce ring  f32  avg  100003
//! ```

use crate::plan::{OpKind, OpPlan};
use gradwire_collectives::{Algorithm, Dtype, Policy, ReduceOp};
use thiserror::Error;

/// A line that is not a call.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}")]
pub struct ListError {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub what: String,
}

/// Reads a list of calls for a group of `world_size` ranks. A call that needs two ranks is left out where there is one.
///
/// # Errors
/// [`ListError`] names the first line that makes no sense.
pub fn parse_list(text: &str, world_size: usize) -> Result<Vec<OpPlan>, ListError> {
    let mut plans = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        let plan = parse_line(&words, world_size).map_err(|what| ListError { line: index + 1, what })?;
        let alone = matches!(plan.kind, OpKind::SendReceive { from, to, .. } if from == to);
        plans.extend((!alone).then_some(plan));
    }
    Ok(plans)
}

fn parse_line(words: &[&str], world_size: usize) -> Result<OpPlan, String> {
    let (name, rest) = words.split_first().ok_or("empty")?;
    let word = |index: usize| rest.get(index).copied().ok_or_else(|| format!("{name}: too few words"));
    let rank = |index| word(index).and_then(number).map(|rank| rank % world_size);
    let (kind, used) = match *name {
        "barrier" => (OpKind::Barrier, 0),
        "all_reduce" => (OpKind::AllReduce(algorithm(word(0)?)?), 1),
        "broadcast" => (OpKind::Broadcast(rank(0)?), 1),
        "reduce" => (OpKind::Reduce(rank(0)?), 1),
        "gather" => (OpKind::Gather(rank(0)?), 1),
        "scatter" => (OpKind::Scatter(rank(0)?), 1),
        "all_gather" => (OpKind::AllGather, 0),
        "reduce_scatter" => (OpKind::ReduceScatter, 0),
        "all_to_all" => (OpKind::AllToAll, 0),
        "send" | "send_any" => {
            (OpKind::SendReceive { from: rank(0)?, to: rank(1)?, any_source: *name == "send_any" }, 2)
        }
        other => return Err(format!("unknown collective {other:?}")),
    };
    let mut plan = OpPlan {
        kind,
        dtype: Dtype::Bytes,
        elems: 0,
        reduce: ReduceOp::Sum,
        policy: Policy::RELIABLE,
        in_place: false,
        priority: 0,
    };
    if kind != OpKind::Barrier {
        plan.dtype = dtype(word(used)?)?;
        plan.reduce = reduction(word(used + 1)?)?;
        plan.elems = number(word(used + 2)?)?;
    }
    Ok(plan)
}

fn number(word: &str) -> Result<usize, String> {
    word.parse().map_err(|error| format!("{word:?}: {error}"))
}

fn algorithm(word: &str) -> Result<Algorithm, String> {
    match word {
        "auto" => Ok(Algorithm::Auto),
        "ring" => Ok(Algorithm::Ring),
        "transpose" => Ok(Algorithm::Transpose),
        "servers" => Ok(Algorithm::ParameterServer),
        "halving" => Ok(Algorithm::HalvingDoubling),
        "weighted" => Ok(Algorithm::WeightedTranspose),
        "one_shot" => Ok(Algorithm::OneShot),
        other => Err(format!("unknown schedule {other:?}")),
    }
}

fn dtype(word: &str) -> Result<Dtype, String> {
    let known = [
        ("bytes", Dtype::Bytes),
        ("f32", Dtype::F32),
        ("f64", Dtype::F64),
        ("f16", Dtype::F16),
        ("bf16", Dtype::Bf16),
        ("u8", Dtype::U8),
        ("i8", Dtype::I8),
        ("i16", Dtype::I16),
        ("i32", Dtype::I32),
        ("i64", Dtype::I64),
        ("u16", Dtype::U16),
        ("u32", Dtype::U32),
        ("u64", Dtype::U64),
        ("bool", Dtype::Bool),
    ];
    let found = known.iter().find(|(name, _)| *name == word);
    found.map(|(_, dtype)| *dtype).ok_or_else(|| format!("unknown dtype {word:?}"))
}

fn reduction(word: &str) -> Result<ReduceOp, String> {
    match word {
        "sum" => Ok(ReduceOp::Sum),
        "avg" => Ok(ReduceOp::Avg),
        "min" => Ok(ReduceOp::Min),
        "max" => Ok(ReduceOp::Max),
        "or" => Ok(ReduceOp::BitOr),
        "and" => Ok(ReduceOp::BitAnd),
        "xor" => Ok(ReduceOp::BitXor),
        "product" => Ok(ReduceOp::Product),
        "twice" => Ok(ReduceOp::PremulSum(2.0)),
        other => Err(format!("unknown reduction {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    #[test]
    fn a_list_is_read_and_a_wrong_line_is_named() {
        let plans = parse_list("# nothing\n\nbroadcast 5 f32 sum 7 # to all\nsend 0 1 bytes sum 3\n", 4);
        let plans = plans.expect("two calls");
        assert_eq!((plans.len(), plans[0].kind, plans[0].elems), (2, OpKind::Broadcast(1), 7));
        let error = parse_list("barrier\nall_reduce spiral f32 sum 1", 2).expect_err("no such schedule");
        assert_eq!(error.to_string(), "line 2: unknown schedule \"spiral\"");
    }

    #[test]
    fn a_list_with_any_words_and_characters_in_it_is_one_whose_ranks_exist_or_names_a_line_of_it() {
        let mut read = 0;
        for seed in 0..20_000 {
            let mut rng = Rng::new(seed);
            let world_size = rng.below(1..9) as usize;
            let mut text = String::new();
            for _ in 0..rng.below(1..4) {
                let line = LINES[rng.below(0..LINES.len() as u64) as usize];
                for word in line.split(' ') {
                    match rng.below(0..60) {
                        0 => text.extend(char::from_u32(rng.below(0..0x11_0000) as u32)),
                        1..4 => text += WORDS[rng.below(0..WORDS.len() as u64) as usize],
                        _ => text += word,
                    }
                    text += if rng.chance(0.98) { " " } else { "" };
                }
                text += "\n";
            }
            match parse_list(&text, world_size) {
                Ok(plans) => {
                    let mut ranks = plans.iter().flat_map(|plan| ranks_of(plan.kind));
                    assert!(ranks.all(|rank| rank < world_size), "{text:?}");
                    read += 1;
                }
                Err(error) => assert!((1..=text.lines().count()).contains(&error.line), "{error}: {text:?}"),
            }
        }
        assert!((2_000..18_000).contains(&read), "{read} lists were right");
    }

    const LINES: [&str; 6] = [
        "barrier",
        "all_reduce ring f32 sum 100",
        "broadcast 6 f64 max 1",
        "gather 3 u8 sum 0 # a word",
        "send 0 5 bytes sum 3",
        "send_any 7 2 bool or 9",
    ];
    const WORDS: [&str; 8] =
        ["\n", "#", "-1", "1.5", "", "18446744073709551615", "18446744073709551616", "all_gather"];

    fn ranks_of(kind: OpKind) -> impl Iterator<Item = usize> {
        let ranks = match kind {
            OpKind::Broadcast(root) | OpKind::Gather(root) => [Some(root), None],
            OpKind::SendReceive { from, to, .. } => [Some(from), Some(to)],
            _ => [None, None],
        };
        ranks.into_iter().flatten()
    }

    #[test]
    fn a_group_of_one_has_nobody_to_send_to() {
        assert_eq!(parse_list("send 0 1 bytes sum 3", 1), Ok(Vec::new()));
    }
}
