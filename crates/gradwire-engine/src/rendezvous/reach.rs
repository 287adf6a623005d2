//! Where a peer may be reached, as the records of both ends say.

use super::Record;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

impl Record {
    /// Addresses at which `peer` may be reached from here, best first. `within_host`: without leaving it.
    pub(crate) fn candidates(&self, peer: &Self, within_host: bool) -> Vec<SocketAddr> {
        if self.ipv6 != peer.ipv6 {
            return Vec::new();
        }
        let loopback: IpAddr =
            if peer.ipv6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
        let local = self.is_local_to(peer) && self.loopback && peer.loopback;
        let first = local.then_some(loopback);
        // What is an address of this host too, such as a bridge of containers that every host has, does not leave it.
        let leaves = |address: &IpAddr| self.is_local_to(peer) || !self.addresses.contains(address);
        let outward = || peer.addresses.iter().copied().filter(|address| !address.is_loopback());
        let any_leaves = outward().any(|address| leaves(&address));
        let others = outward().filter(|address| !within_host && (leaves(address) || !any_leaves));
        first.into_iter().chain(others).map(|address| SocketAddr::new(address, peer.port)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::records;
    use super::*;

    #[test]
    fn an_address_that_this_host_has_too_leads_to_no_other_host() {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let mut all = records(2);
        (all[0].addresses, all[1].addresses) =
            (ips(&["10.0.0.1", "172.18.0.1"]), ips(&["172.18.0.1", "10.0.0.2"]));
        all[1].boot_id = "another host".to_owned();
        let reach = |all: &[Record]| -> Vec<IpAddr> {
            all[0].candidates(&all[1], false).iter().map(SocketAddr::ip).collect()
        };
        assert_eq!(reach(&all), ips(&["10.0.0.2"]));
        all[1].addresses.pop();
        assert_eq!(reach(&all), ips(&["172.18.0.1"]), "the error should name something");
    }

    #[test]
    fn loopback_is_offered_only_inside_one_network_namespace() {
        let mut all = records(2);
        let text = |records: &[Record]| -> Vec<String> {
            records[0].candidates(&records[1], false).iter().map(ToString::to_string).collect()
        };
        assert_eq!(text(&all), ["127.0.0.1:47401", "10.0.0.1:47401"]);
        let within_host = all[0].candidates(&all[1], true);
        assert_eq!(
            within_host,
            ["127.0.0.1:47401".parse().unwrap()],
            "nothing goes where another host may be"
        );
        all[1].network_namespace = 2;
        assert_eq!(text(&all), ["10.0.0.1:47401"]);
        all[1].network_namespace = 1;
        all[1].port = all[0].port;
        assert!(!super::super::are_local(&all), "hosts resumed from one image of memory");
        assert_eq!(text(&all), ["10.0.0.1:47400"]);
        all[1].port = 47_401;
        all[1].boot_id = "c".into();
        all[1].addresses.push("127.0.0.1".parse().unwrap());
        assert_eq!(text(&all), ["10.0.0.1:47401"]);
        all[1].ipv6 = true;
        assert!(text(&all).is_empty());
    }

    #[test]
    fn two_ranks_with_one_port_are_on_two_hosts_whichever_two_they_are() {
        let are_local = super::super::are_local;
        assert!(are_local(&records(4)));
        for (one, other) in [(0, 1), (0, 3), (1, 2), (3, 1)] {
            let mut all = records(4);
            all[one].port = all[other].port;
            assert!(!are_local(&all), "{one} and {other}");
        }
    }
}
