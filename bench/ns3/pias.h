// SPDX-License-Identifier: MIT OR Apache-2.0
//
// PIAS, as MLT 6.2 and DLCP 5.2 take it: DCTCP over strict priorities, of which a flow gets a lower one the more it has sent, and marks by the
// length of the whole port. Neither paper gives the thresholds. A packet's band is its DSCP, so nothing of ns-3 is changed.
#pragma once

#include "fabric.h"

namespace pias {

using namespace ns3;

constexpr uint32_t kBands = 8;

inline fabric::Bands Bands() { return {std::vector<uint32_t>(kBands, 65 * 1500), false, true}; }

// Every `step` bytes that the socket has sent cost one band, down to the last one.
inline void Demote(Ptr<Socket> sender, uint64_t step) {
    // Not a Ptr: the socket would own itself.
    Socket* socket = PeekPointer(sender);
    auto sent = std::make_shared<uint64_t>(0);
    auto onSent = [socket, sent, step](Ptr<const Packet> packet, const TcpHeader&, Ptr<const TcpSocketBase>) {
        *sent += packet->GetSize();
        // Holds for the next packet.
        const uint64_t band = std::min<uint64_t>(*sent / step, kBands - 1);
        socket->SetIpTos(static_cast<uint8_t>(band << 2));
    };
    sender->TraceConnectWithoutContext(
        "Tx", Callback<void, Ptr<const Packet>, const TcpHeader&, Ptr<const TcpSocketBase>>(onSent));
}

}  // namespace pias
