//! A network thread that panics: whoever waits for it hears why.

use crate::common::{all_reduce, cluster, config, impatient, Broken, Tensor, PATIENCE};
use gradwire_engine::collectives::{Bucket, ImportanceRule, Marks, OpError, Policy, ReduceOp, Request, Tags};
use gradwire_engine::{EngineConfig, EngineError, GroupHandle, OnPeerLoss, OpHandle};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex};

/// A rule that says when it is asked, and answers when it is told to: meanwhile calls gather.
#[derive(Debug)]
struct Gate {
    is_asked: Sender<()>,
    opens: Mutex<Receiver<()>>,
}

impl ImportanceRule for Gate {
    fn mark(&self, _bucket: &Bucket<'_>, _scratch: &mut Vec<f32>, _marks: &mut Marks) {
        self.is_asked.send(()).unwrap();
        self.opens.lock().unwrap().recv_timeout(PATIENCE).unwrap();
    }
}

fn tolerant(tensor: &mut Tensor, rule: Option<Arc<dyn ImportanceRule>>) -> Request {
    let tags = Tags { importance: rule, ..Tags::default() };
    Request { policy: Policy::AUTO, reduce: ReduceOp::Avg, tags, ..all_reduce(tensor.view()) }
}

#[test]
fn calls_that_wait_for_a_thread_that_panics_hear_why_and_so_does_whoever_calls_later() {
    let (_engines, groups) = cluster(2, &config());
    let (asked, (open, opens)) = (channel(), channel());
    let gate = Gate { is_asked: asked.0, opens: Mutex::new(opens) };
    let rules: [Option<Arc<dyn ImportanceRule>>; 4] =
        [Some(Arc::new(gate)), Some(Arc::new(Broken { on: "gradwire-net" })), None, None];
    let mut tensors: Vec<Tensor> = rules.iter().map(|_| Tensor(vec![1.0; 1_000])).collect();
    let mut calls = rules.into_iter().zip(&mut tensors).map(|(rule, tensor)| tolerant(tensor, rule));
    let submit = |request| groups[0].submit(request, Box::new(())).unwrap();
    let mut ops: Vec<OpHandle> = calls.by_ref().take(1).map(submit).collect();
    asked.1.recv_timeout(PATIENCE).unwrap();
    ops.extend(calls.map(submit));
    open.send(()).unwrap();
    for (number, op) in ops.iter().enumerate() {
        let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
        let Err(OpError::Aborted { rank: 0, cause, .. }) = outcome else { panic!("{number}: {outcome:?}") };
        assert!(cause.contains("the error in the rule"), "{number}: {cause}");
    }
    let mut tensor = Tensor(vec![1.0; 10]);
    let later = groups[0].submit(all_reduce(tensor.view()), Box::new(()));
    let Err(EngineError::Stopped { cause: Some(cause) }) = later else { panic!("{later:?}") };
    assert!(cause.contains("the error in the rule"), "{cause}");
}

#[test]
fn a_rank_whose_thread_panics_is_lost_and_those_that_may_go_on_do() {
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, ..impatient() };
    let (_engines, groups) = cluster(3, &config);
    let means = |broken: bool, groups: &[GroupHandle]| {
        let mut tensors: Vec<Tensor> =
            (1..=groups.len()).map(|rank| Tensor(vec![rank as f32; 1_000])).collect();
        let calls = groups.iter().zip(&mut tensors).enumerate();
        let ops: Vec<OpHandle> = calls
            .map(|(rank, (group, tensor))| {
                let rule = (broken && rank == 2).then(|| Arc::new(Broken { on: "gradwire-net" }) as _);
                group.submit(tolerant(tensor, rule), Box::new(())).unwrap()
            })
            .collect();
        let outcomes = ops.iter().map(|op| op.wait(Some(PATIENCE)).expect("ends in time").clone());
        (outcomes.collect::<Vec<_>>(), tensors)
    };
    let (outcomes, tensors) = means(true, &groups);
    let Err(OpError::Aborted { rank: 2, cause, .. }) = &outcomes[2] else { panic!("{outcomes:?}") };
    assert!(cause.contains("the error in the rule"), "{cause}");
    assert!(outcomes[..2].iter().all(Result::is_ok), "{outcomes:?}");
    assert!(
        tensors[..2].iter().all(|tensor| tensor.0 == vec![1.5; 1_000]),
        "the mean of those that are left"
    );
    let (outcomes, tensors) = means(false, &groups[..2]);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert!(tensors.iter().all(|tensor| tensor.0 == vec![1.5; 1_000]));
}
