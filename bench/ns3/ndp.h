// SPDX-License-Identifier: MIT OR Apache-2.0
//
// NDP (Handley et al., SIGCOMM 2017), by its mechanisms. A sender sends a first window at once; everything after it is asked for by the
// receiver, one packet with each pull, and pulls leave the receiver at the rate of its link, in turns over its flows. A port that holds
// eight data packets cuts the payload off the arriving packet or off the last one that waits, by chance, and forwards the header ahead of
// data, at most ten for each packet. A header is answered with a NACK, a packet with an ACK. Senders spread packets over the spines
// in turns, by an order that they shuffle.
//
// Different from the paper: the receiver knows the size of a flow, and pulls no more than is missing; a header that a full port
// drops is not returned to its sender, who waits for a timeout (it is counted).
#pragma once

#include "fabric.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>

namespace ndp {

using namespace ns3;

constexpr uint32_t kPayload = 1448;
constexpr uint16_t kPort = 4001;

enum class Kind : uint8_t { Data, Ack, Nack, Pull };

class NdpHeader : public Header {
  public:
    NdpHeader() = default;
    NdpHeader(Kind kind, uint32_t flow, uint32_t number) : kind(kind), flow(flow), number(number) {}
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::NdpHeader").SetParent<Header>().AddConstructor<NdpHeader>();
        return id;
    }
    TypeId GetInstanceTypeId() const override { return GetTypeId(); }
    uint32_t GetSerializedSize() const override { return 12; }
    void Serialize(Buffer::Iterator at) const override {
        at.WriteHtonU32(static_cast<uint32_t>(kind));
        at.WriteHtonU32(flow);
        at.WriteHtonU32(number);
    }
    uint32_t Deserialize(Buffer::Iterator at) override {
        kind = static_cast<Kind>(at.ReadNtohU32());
        flow = at.ReadNtohU32();
        number = at.ReadNtohU32();
        return GetSerializedSize();
    }
    void Print(std::ostream& out) const override { out << flow << " " << number; }

    Kind kind = Kind::Data;
    uint32_t flow = 0;
    uint32_t number = 0;  // of the packet; of a pull: how many packets it asks for
};

// UDP and NDP: what is left of a packet that was cut.
constexpr uint32_t kHeaders = 8 + 12;

// Gives back its last packet.
class Waiting : public Queue<QueueDiscItem> {
  public:
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::NdpWaiting").SetParent<Queue<QueueDiscItem>>().AddConstructor<Waiting>();
        return id;
    }
    bool Enqueue(Ptr<QueueDiscItem> item) override { return DoEnqueue(GetContainer().end(), item); }
    Ptr<QueueDiscItem> Dequeue() override { return DoDequeue(GetContainer().begin()); }
    Ptr<QueueDiscItem> Remove() override { return DoRemove(std::prev(GetContainer().end())); }
    Ptr<const QueueDiscItem> Peek() const override { return DoPeek(GetContainer().begin()); }
};

class PortQueue : public QueueDisc {
  public:
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::NdpQueue").SetParent<QueueDisc>().AddConstructor<PortQueue>();
        return id;
    }
    PortQueue() : QueueDisc(QueueDiscSizePolicy::NO_LIMITS) {}

    // Of `bytes` bytes; `packets` of them have a payload. A host's own queue cuts nothing.
    static Ptr<QueueDisc> Make(uint32_t bytes, uint32_t packets, fabric::Counters* counters) {
        Ptr<PortQueue> queue = CreateObject<PortQueue>();
        queue->m_bytes = bytes;
        queue->m_packets = bytes == fabric::kUnlimited ? fabric::kUnlimited : packets;
        queue->m_counters = counters;
        return queue;
    }

  private:
    static constexpr size_t kControl = 0;
    static constexpr size_t kData = 1;
    static constexpr uint32_t kHeadersForEachPacket = 10;

    bool DoEnqueue(Ptr<QueueDiscItem> item) override {
        if (item->GetPacket()->GetSize() <= kHeaders) {
            return EnqueueControl(item);
        }
        Ptr<Queue<QueueDiscItem>> data = GetInternalQueue(kData);
        if (data->GetNPackets() < m_packets) {
            return data->Enqueue(item);
        }
        m_counters->trimmed += 1;
        if (m_random->GetValue() < 0.5) {
            Cut(item);
            return EnqueueControl(item);
        }
        Ptr<QueueDiscItem> last = DynamicCast<Waiting>(data)->Remove();
        data->Enqueue(item);
        Cut(last);
        // As a packet that has just come: the books of the queue want one arrival for each entry.
        Enqueue(last);
        return true;
    }

    bool EnqueueControl(Ptr<QueueDiscItem> item) {
        if (GetInternalQueue(kControl)->GetNBytes() + GetInternalQueue(kData)->GetNBytes() + item->GetSize() > m_bytes) {
            m_counters->overflowed += 1;
            DropBeforeEnqueue(item, "full");
            return false;
        }
        return GetInternalQueue(kControl)->Enqueue(item);
    }

    static void Cut(Ptr<QueueDiscItem> item) {
        Ptr<Packet> packet = item->GetPacket();
        packet->RemoveAtEnd(packet->GetSize() - kHeaders);
    }

    Ptr<QueueDiscItem> DoDequeue() override {
        Ptr<Queue<QueueDiscItem>> control = GetInternalQueue(kControl);
        Ptr<Queue<QueueDiscItem>> data = GetInternalQueue(kData);
        const bool isDatasTurn = control->IsEmpty() || m_inARow >= kHeadersForEachPacket;
        if (isDatasTurn && !data->IsEmpty()) {
            m_inARow = 0;
            return data->Dequeue();
        }
        m_inARow += 1;
        return control->IsEmpty() ? nullptr : control->Dequeue();
    }

    bool CheckConfig() override {
        while (GetNInternalQueues() <= kData) {
            Ptr<Waiting> waiting = CreateObject<Waiting>();
            waiting->SetMaxSize(QueueSize("1000000p"));
            AddInternalQueue(waiting);
        }
        return true;
    }

    void InitializeParams() override {}

    uint32_t m_bytes = 0;
    uint32_t m_packets = 0;
    uint32_t m_inARow = 0;
    fabric::Counters* m_counters = nullptr;
    Ptr<UniformRandomVariable> m_random = CreateObject<UniformRandomVariable>();
};

struct Settings {
    uint32_t window = 207;  // packets: 100 Gbit/s for 24 us
    uint64_t hostRate = 100'000'000'000;
    uint32_t spines = 4;
    Time timeout = MilliSeconds(10);
};

// The transport of one host.
class Endpoint {
  public:
    using Done = std::function<void()>;

    Endpoint(const Settings& settings, Ptr<Node> node, uint64_t* timeouts) : m_settings(settings), m_timeouts(timeouts) {
        m_socket = Socket::CreateSocket(node, UdpSocketFactory::GetTypeId());
        m_socket->Bind(InetSocketAddress(Ipv4Address::GetAny(), kPort));
        m_socket->SetAttribute("RcvBufSize", UintegerValue(1U << 30));
        m_socket->SetRecvCallback(MakeCallback(&Endpoint::OnReceive, this));
        m_device = DynamicCast<PointToPointNetDevice>(node->GetObject<Ipv4>()->GetNetDevice(1));
        m_nic = node->GetObject<TrafficControlLayer>()->GetRootQueueDiscOnDevice(m_device);
        auto onLeft = [this](Ptr<const Packet>) { Simulator::ScheduleNow(&Endpoint::Pump, this); };
        m_device->TraceConnectWithoutContext("PhyTxEnd", Callback<void, Ptr<const Packet>>(onLeft));
        for (uint32_t spine = 0; spine < settings.spines; ++spine) {
            m_spines.push_back(spine);
        }
    }
    Endpoint(const Endpoint&) = delete;

    void Expect(uint32_t flow, Ipv4Address from, uint64_t bytes, Done done) {
        const uint32_t packets = PacketsOf(bytes);
        const uint32_t granted = std::min(m_settings.window, packets);
        m_receives[flow] = {from, std::vector<bool>(packets), packets, granted, packets, 0, std::move(done)};
    }

    void Send(uint32_t flow, Ipv4Address to, uint64_t bytes) {
        const uint32_t packets = PacketsOf(bytes);
        SendFlow& send = m_sends[flow];
        send = {to, bytes, packets, 0, std::min(m_settings.window, packets), 0, {}, std::vector<bool>(packets), packets, Simulator::Now(), false};
        Queue(flow, send);
        Simulator::Schedule(m_settings.timeout, &Endpoint::CheckTimeout, this, flow);
        Pump();
    }

  private:
    struct SendFlow {
        Ipv4Address to;
        uint64_t bytes;
        uint32_t packets;
        uint32_t next;  // never sent so far
        uint32_t permits;
        uint32_t pulls;
        std::deque<uint32_t> again;
        std::vector<bool> acknowledged;
        uint32_t missing;
        Time heard;
        bool hasTurn;

        bool HasPacket() const { return permits > 0 && (!again.empty() || next < packets); }
    };

    struct ReceiveFlow {
        Ipv4Address from;
        std::vector<bool> received;
        uint32_t missing;
        uint32_t granted;  // packets that its sender may have sent
        uint32_t needed;   // packets that it has to send: each once, and what was cut again
        uint32_t pulls;
        Done done;
    };

    static uint32_t PacketsOf(uint64_t bytes) { return static_cast<uint32_t>((bytes + kPayload - 1) / kPayload); }

    // Hands packets to the network card while it has little: flows take turns.
    void Pump() {
        while (!m_turns.empty() && m_nic->GetNBytes() + m_device->GetQueue()->GetNBytes() < 2 * kPayload) {
            const uint32_t flow = m_turns.front();
            m_turns.pop_front();
            auto found = m_sends.find(flow);
            if (found == m_sends.end()) {
                continue;
            }
            SendFlow& send = found->second;
            send.hasTurn = false;
            uint32_t number = send.next;
            if (send.again.empty()) {
                send.next += 1;
            } else {
                number = send.again.front();
                send.again.pop_front();
            }
            send.permits -= 1;
            Queue(flow, send);
            const uint64_t before = uint64_t{number} * kPayload;
            Transmit(send.to, {Kind::Data, flow, number}, static_cast<uint32_t>(std::min<uint64_t>(kPayload, send.bytes - before)));
        }
    }

    void Queue(uint32_t flow, SendFlow& send) {
        if (!send.hasTurn && send.HasPacket()) {
            send.hasTurn = true;
            m_turns.push_back(flow);
        }
    }

    void Allow(uint32_t flow, SendFlow& send, uint32_t packets) {
        send.permits += packets;
        Queue(flow, send);
        Pump();
    }

    void Transmit(Ipv4Address to, const NdpHeader& header, uint32_t payload) {
        if (m_nextSpine % m_spines.size() == 0) {
            for (size_t last = m_spines.size() - 1; last > 0; --last) {
                std::swap(m_spines[last], m_spines[m_random->GetInteger(0, last)]);
            }
        }
        Ptr<Packet> packet = Create<Packet>(payload);
        packet->AddHeader(header);
        packet->AddPacketTag(fabric::PathTag(m_spines[m_nextSpine++ % m_spines.size()]));
        m_socket->SendTo(packet, 0, InetSocketAddress(to, kPort));
    }

    void OnReceive(Ptr<Socket> socket) {
        while (Ptr<Packet> packet = socket->Recv()) {
            NdpHeader header;
            packet->RemoveHeader(header);
            if (header.kind == Kind::Data) {
                OnData(header, packet->GetSize() > 0);
            } else if (auto found = m_sends.find(header.flow); found != m_sends.end()) {
                OnAnswer(header, found->second);
            }
        }
    }

    void OnData(const NdpHeader& header, bool isWhole) {
        auto found = m_receives.find(header.flow);
        if (found == m_receives.end()) {
            return;
        }
        ReceiveFlow& receive = found->second;
        Transmit(receive.from, {isWhole ? Kind::Ack : Kind::Nack, header.flow, header.number}, 0);
        receive.needed += isWhole ? 0 : 1;
        if (isWhole && !receive.received[header.number]) {
            receive.received[header.number] = true;
            receive.missing -= 1;
        }
        if (receive.missing == 0 && receive.done) {
            Done done = std::move(receive.done);
            receive.done = nullptr;
            done();
        } else if (receive.granted < receive.needed) {
            receive.granted += 1;
            m_pulls[header.flow] += 1;
            Pull();
        }
    }

    // The next pull leaves: flows that wait for one take turns.
    void Pull() {
        if (m_pulls.empty() || m_pacer.IsRunning()) {
            return;
        }
        auto next = m_pulls.upper_bound(m_lastPulled);
        next = next == m_pulls.end() ? m_pulls.begin() : next;
        m_lastPulled = next->first;
        ReceiveFlow& receive = m_receives[m_lastPulled];
        if (--next->second == 0 || receive.missing == 0) {
            m_pulls.erase(next);
        }
        if (receive.missing == 0) {
            return Pull();
        }
        receive.pulls += 1;
        Transmit(receive.from, {Kind::Pull, m_lastPulled, receive.pulls}, 0);
        const uint64_t bits = (kPayload + kHeaders + 22) * 8;
        m_pacer = Simulator::Schedule(NanoSeconds(bits * 1'000'000'000 / m_settings.hostRate), &Endpoint::Pull, this);
    }

    void OnAnswer(const NdpHeader& header, SendFlow& send) {
        send.heard = Simulator::Now();
        if (header.kind == Kind::Nack) {
            send.again.push_back(header.number);
            Allow(header.flow, send, 0);
        } else if (header.kind == Kind::Pull) {
            // Pulls overtake each other: each says how many there were.
            const uint32_t more = header.number > send.pulls ? header.number - send.pulls : 0;
            send.pulls += more;
            Allow(header.flow, send, more);
        } else if (!send.acknowledged[header.number]) {
            send.acknowledged[header.number] = true;
            send.missing -= 1;
        }
        if (send.missing == 0) {
            m_sends.erase(header.flow);
        }
    }

    // Only a header that was lost makes a sender wait: it sends again what was not acknowledged first.
    void CheckTimeout(uint32_t flow) {
        auto found = m_sends.find(flow);
        if (found == m_sends.end()) {
            return;
        }
        SendFlow& send = found->second;
        const Time due = send.heard + m_settings.timeout;
        if (Simulator::Now() >= due) {
            *m_timeouts += 1;
            const auto first = std::find(send.acknowledged.begin(), send.acknowledged.begin() + send.next, false);
            if (first != send.acknowledged.begin() + send.next) {
                send.again.push_back(static_cast<uint32_t>(first - send.acknowledged.begin()));
            }
            Allow(flow, send, 1);
            Simulator::Schedule(m_settings.timeout, &Endpoint::CheckTimeout, this, flow);
        } else {
            Simulator::Schedule(due - Simulator::Now(), &Endpoint::CheckTimeout, this, flow);
        }
    }

    Settings m_settings;
    uint64_t* m_timeouts;
    Ptr<Socket> m_socket;
    Ptr<PointToPointNetDevice> m_device;
    Ptr<QueueDisc> m_nic;
    std::map<uint32_t, SendFlow> m_sends;
    std::map<uint32_t, ReceiveFlow> m_receives;
    std::deque<uint32_t> m_turns;
    // Pulls that each flow waits for.
    std::map<uint32_t, uint32_t> m_pulls;
    uint32_t m_lastPulled = 0;
    EventId m_pacer;
    std::vector<uint32_t> m_spines;
    size_t m_nextSpine = 0;
    Ptr<UniformRandomVariable> m_random = CreateObject<UniformRandomVariable>();
};

}  // namespace ndp
