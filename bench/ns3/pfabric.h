// SPDX-License-Identifier: MIT OR Apache-2.0
//
// pFabric, by its mechanisms: a packet's priority is what its flow still has to send; a full port drops the packet of the flow that has
// most left, and sends the earliest packet of the flow that has least left. Hosts send a fixed window, the product of rate and round trip,
// from the beginning, and send again after a short fixed time and for no other reason. Its step down to probes after many timeouts is
// left out.
#pragma once

#include "fabric.h"

namespace pfabric {

using namespace ns3;

// Bytes that the flow of a packet still has to send, this one included.
class RemainingTag : public Tag {
  public:
    explicit RemainingTag(uint32_t bytes = 0) : bytes(bytes) {}
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::RemainingTag").SetParent<Tag>().AddConstructor<RemainingTag>();
        return id;
    }
    TypeId GetInstanceTypeId() const override { return GetTypeId(); }
    uint32_t GetSerializedSize() const override { return 4; }
    void Serialize(TagBuffer buffer) const override { buffer.WriteU32(bytes); }
    void Deserialize(TagBuffer buffer) override { bytes = buffer.ReadU32(); }
    void Print(std::ostream& out) const override { out << bytes; }

    uint32_t bytes;
};

// Acknowledgements carry no tag and go first.
inline uint32_t RemainingOf(Ptr<const QueueDiscItem> item) {
    RemainingTag tag;
    item->GetPacket()->PeekPacketTag(tag);
    return tag.bytes;
}

class Waiting : public Queue<QueueDiscItem> {
  public:
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::PFabricWaiting").SetParent<Queue<QueueDiscItem>>().AddConstructor<Waiting>();
        return id;
    }
    bool Enqueue(Ptr<QueueDiscItem> item) override { return DoEnqueue(GetContainer().end(), item); }
    Ptr<QueueDiscItem> Dequeue() override { return DoDequeue(Next()); }
    Ptr<QueueDiscItem> Remove() override { return DoRemove(Worst()); }
    Ptr<const QueueDiscItem> Peek() const override { return DoPeek(Next()); }

    uint32_t RemainingOfWorst() const { return RemainingOf(*Worst()); }

  private:
    using Place = std::list<Ptr<QueueDiscItem>>::const_iterator;

    // A flow's packets come in order: its earliest is the first of those with its ports and addresses.
    Place Next() const {
        const auto& all = GetContainer();
        auto least = std::min_element(all.begin(), all.end(), [](auto& a, auto& b) { return RemainingOf(a) < RemainingOf(b); });
        if (least == all.end() || RemainingOf(*least) == 0) {
            return least;
        }
        const uint64_t flow = FlowOf(*least);
        return std::find_if(all.begin(), all.end(), [flow](auto& item) { return RemainingOf(item) > 0 && FlowOf(item) == flow; });
    }

    Place Worst() const {
        const auto& all = GetContainer();
        return std::max_element(all.begin(), all.end(), [](auto& a, auto& b) { return RemainingOf(a) < RemainingOf(b); });
    }

    static uint64_t FlowOf(Ptr<const QueueDiscItem> item) {
        const Ipv4Header& header = DynamicCast<const Ipv4QueueDiscItem>(item)->GetHeader();
        uint8_t ports[4] = {0, 0, 0, 0};
        item->GetPacket()->CopyData(ports, sizeof ports);
        const uint64_t hosts = uint64_t{header.GetSource().Get()} << 32 | header.GetDestination().Get();
        return fabric::Mix(hosts) ^ (uint64_t{ports[0]} << 24 | ports[1] << 16 | ports[2] << 8 | ports[3]);
    }
};

class PortQueue : public QueueDisc {
  public:
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::PFabricQueue").SetParent<QueueDisc>().AddConstructor<PortQueue>();
        return id;
    }
    PortQueue() : QueueDisc(QueueDiscSizePolicy::NO_LIMITS) {}

    static Ptr<QueueDisc> Make(uint32_t bytes, fabric::Counters* counters) {
        Ptr<PortQueue> queue = CreateObject<PortQueue>();
        queue->m_bytes = bytes;
        queue->m_counters = counters;
        return queue;
    }

  private:
    bool DoEnqueue(Ptr<QueueDiscItem> item) override {
        Ptr<Waiting> waiting = DynamicCast<Waiting>(GetInternalQueue(0));
        while (waiting->GetNBytes() + item->GetSize() > m_bytes) {
            m_counters->overflowed += 1;
            if (waiting->IsEmpty() || waiting->RemainingOfWorst() <= RemainingOf(item)) {
                DropBeforeEnqueue(item, "most left");
                return false;
            }
            waiting->Remove();
        }
        return waiting->Enqueue(item);
    }

    Ptr<QueueDiscItem> DoDequeue() override { return GetInternalQueue(0)->IsEmpty() ? nullptr : GetInternalQueue(0)->Dequeue(); }

    bool CheckConfig() override {
        if (GetNInternalQueues() == 0) {
            Ptr<Waiting> waiting = CreateObject<Waiting>();
            waiting->SetMaxSize(QueueSize("1000000p"));
            AddInternalQueue(waiting);
        }
        return true;
    }

    void InitializeParams() override {}

    uint32_t m_bytes = 0;
    fabric::Counters* m_counters = nullptr;
};

// A window that nothing changes.
class FixedWindow : public TcpCongestionOps {
  public:
    // 100 Gbit/s for 24 us.
    static constexpr uint32_t kPackets = 207;

    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::FixedWindow").SetParent<TcpCongestionOps>().AddConstructor<FixedWindow>();
        return id;
    }
    std::string GetName() const override { return "FixedWindow"; }
    uint32_t GetSsThresh(Ptr<const TcpSocketState> state, uint32_t) override { return kPackets * state->m_segmentSize; }
    void IncreaseWindow(Ptr<TcpSocketState> state, uint32_t) override { state->m_cWnd = kPackets * state->m_segmentSize; }
    Ptr<TcpCongestionOps> Fork() override { return CopyObject<FixedWindow>(this); }
};

inline void Configure() {
    Config::SetDefault("ns3::TcpL4Protocol::SocketType", TypeIdValue(FixedWindow::GetTypeId()));
    Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(FixedWindow::kPackets));
    // Only the timeout sends again.
    Config::SetDefault("ns3::TcpSocketBase::ReTxThreshold", UintegerValue(1'000'000));
}

// Tells the ports what the flow of each packet has left.
inline void Tell(Ptr<Socket> sender, uint64_t bytes) {
    auto onSent = [bytes](Ptr<const Packet> packet, const TcpHeader& header, Ptr<const TcpSocketBase>) {
        if (packet->GetSize() > 0) {
            // The handshake has the number 0.
            const uint64_t before = header.GetSequenceNumber().GetValue() - 1;
            packet->AddPacketTag(RemainingTag(static_cast<uint32_t>(bytes - std::min(before, bytes - 1))));
        }
    };
    sender->TraceConnectWithoutContext(
        "Tx", Callback<void, Ptr<const Packet>, const TcpHeader&, Ptr<const TcpSocketBase>>(onSent));
}

}  // namespace pfabric
