//! Marks on real sockets over loopback: what a sender asks for is what the receiver's kernel reports.

use crate::common::{all_reduce, cluster, config, Tensor, PATIENCE};
use gradwire_engine::collectives::{Magnitude, Policy, ReduceOp, Request, Tags};
use gradwire_engine::{EngineConfig, GroupHandle, TagCounts};
use std::sync::Arc;

const CLASS: u8 = 2;
const ELEMS: usize = 400_000;

/// One tolerant mean of two tensors in one bucket, of which the second has far larger gradients.
fn tagged_all_reduce(groups: &[GroupHandle]) {
    let values = (0..ELEMS).map(|i| if i < ELEMS / 2 { 0.001 } else { 1.0 }).collect::<Vec<f32>>();
    let mut tensors: Vec<Tensor> = groups.iter().map(|_| Tensor(values.clone())).collect();
    let tags = Tags { class: CLASS, importance: Some(Arc::new(Magnitude::MLT)) };
    let ops: Vec<_> = groups
        .iter()
        .zip(&mut tensors)
        .map(|(group, tensor)| {
            let request = all_reduce(tensor.view());
            let request =
                Request { policy: Policy::AUTO, reduce: ReduceOp::Avg, tags: tags.clone(), ..request };
            group.submit(request, Box::new(())).expect("running")
        })
        .collect();
    for op in &ops {
        assert!(op.wait(Some(PATIENCE)).expect("ends in time").is_ok());
    }
}

/// Counters of the connection between two ranks, as the sender and as the receiver has them.
fn counted(groups: &[GroupHandle]) -> (TagCounts, TagCounts, u64) {
    let (sender, receiver) = (groups[0].stats().unwrap(), groups[1].stats().unwrap());
    (sender.peers[0].tags, receiver.peers[0].tags, receiver.peers[0].packets_received)
}

// test of: tags/counted, mlt/gradient-aware-queueing
#[test]
fn a_receiver_sees_the_classes_and_ecn_fields_that_were_asked_for() {
    let config =
        EngineConfig { dscp_classes: vec![34, 26, 18, 10], dscp_control: Some(40), ecn: true, ..config() };
    let (engines, groups) = cluster(2, &config);
    if !engines[1].features().traffic_class {
        return eprintln!("skipped: the kernel takes no traffic class with a datagram");
    }
    tagged_all_reduce(&groups);
    let (sent, received, packets) = counted(&groups);
    let class = usize::from(CLASS);
    assert!(packets > 0 && received.received[class] >= packets, "{received:?}");
    assert!(received.received[class] <= sent.sent[class]);
    assert_eq!(
        received.received.iter().sum::<u64>(),
        received.received[class],
        "no other class was asked for"
    );
    // Rank 1 owns a shard of rank 0: in one half of the bucket the gradients are large. All that comes back is exact.
    assert!(received.ecn_capable_received >= received.important_received);
    assert!(received.ecn_capable_received > 0 && received.ecn_capable_received <= sent.sent[class]);
    assert_eq!(received.congestion_received, 0, "nothing on loopback is congested");
}

#[test]
fn without_being_asked_no_packet_differs_from_another() {
    let (_engines, groups) = cluster(2, &config());
    tagged_all_reduce(&groups);
    let (sent, received, packets) = counted(&groups);
    assert!(packets > 0 && sent.sent[usize::from(CLASS)] >= packets);
    assert_eq!((received.received, received.ecn_capable_received), ([0; 8], 0));
}
