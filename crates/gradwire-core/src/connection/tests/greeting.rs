//! What hellos and their answers say.

use super::*;

#[test]
fn an_answer_repeats_which_address_the_copy_of_the_hello_went_to_that_came_first() {
    let [mut from, mut to] = [end(1, 2), end(2, 1)];
    let (now, mut scratch) = (Timestamp::ZERO + DELAY, vec![0; 2_000]);
    let hello = from.connection.poll_transmit(now, &mut scratch).expect("it is due");
    for address in [3, 1] {
        let copy = Transmit { header: Header { offset: address, ..hello.header }, ..hello };
        let datagram = assemble(&copy, &scratch, &BTreeMap::new());
        to.connection.handle_datagram(now, &datagram).expect("a hello");
    }
    let answers = core::iter::from_fn(|| to.connection.poll_transmit(now, &mut scratch));
    let answers: Vec<u32> = answers
        .filter(|sent| sent.header.kind == Kind::Hello && sent.header.flags.contains(Flags::REPLY))
        .map(|sent| sent.header.offset)
        .collect();
    assert_eq!(answers, [3], "one answer for both");
}
