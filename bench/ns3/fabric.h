// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A leaf-spine network in ns-3: MLT section 6.2.1.
//
// What ns-3 has not, in version 3.37: ECMP that keeps a flow on one path (its global routing chooses by chance, packet by packet),
// and a queue of a given number of bytes that marks above a threshold without RED's averages.
#pragma once

#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

namespace fabric {

using namespace ns3;

struct Counters {
    uint64_t overflowed = 0;
    uint64_t marked = 0;
    uint64_t droppedSelectively = 0;
    uint64_t trimmed = 0;
};

// The spine that its sender has chosen for a packet.
class PathTag : public Tag {
  public:
    explicit PathTag(uint32_t spine = 0) : spine(spine) {}
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::PathTag").SetParent<Tag>().AddConstructor<PathTag>();
        return id;
    }
    TypeId GetInstanceTypeId() const override { return GetTypeId(); }
    uint32_t GetSerializedSize() const override { return 4; }
    void Serialize(TagBuffer buffer) const override { buffer.WriteU32(spine); }
    void Deserialize(TagBuffer buffer) override { spine = buffer.ReadU32(); }
    void Print(std::ostream& out) const override { out << spine; }

    uint32_t spine;
};

// What every port of a kind has. A band's threshold: a packet that would lie above so many bytes of it is marked if it is
// ECN-capable (DCTCP's K), and else dropped if `dropsUncapable` (MLT section 5.2); `ofPort`: of all bands together. A packet's band is
// its DSCP, 0 the most urgent.
struct Bands {
    std::vector<uint32_t> thresholds;
    bool dropsUncapable = false;
    bool ofPort = false;
};

// Strict priority over one buffer of `bytes` bytes.
class PortQueue : public QueueDisc {
  public:
    static TypeId GetTypeId() {
        static TypeId id = TypeId("gradwire::PortQueue").SetParent<QueueDisc>().AddConstructor<PortQueue>();
        return id;
    }

    PortQueue() : QueueDisc(QueueDiscSizePolicy::NO_LIMITS) {}

    void Set(uint32_t bytes, const Bands& bands, Counters* counters) {
        m_bytes = bytes;
        m_bands = bands;
        m_counters = counters;
    }

    // Bytes are those on the link, as in gradwire's own fabric: with the header of the link, which queue discs of ns-3 do not see, and
    // with the packet that the device holds back behind the one on the link.
    void CountOnLink(Ptr<PointToPointNetDevice> device) { m_device = device; }

  private:
    // Of PPP.
    static constexpr uint32_t kLinkHeader = 2;

    bool DoEnqueue(Ptr<QueueDiscItem> item) override {
        // The device has put its header before what it holds back.
        const uint32_t ahead = m_device ? m_device->GetQueue()->GetNBytes() : 0;
        const uint32_t size = item->GetSize() + (m_device ? kLinkHeader : 0);
        const size_t band = BandOf(item);
        uint32_t all = 0;
        for (size_t other = 0; other < GetNInternalQueues(); ++other) {
            all += BytesOf(other);
        }
        if (ahead + all + size > m_bytes) {
            m_counters->overflowed += 1;
            DropBeforeEnqueue(item, "full");
            return false;
        }
        const uint32_t before = m_bands.ofPort ? all : BytesOf(band);
        if (ahead + before + size > m_bands.thresholds[band]) {
            if (Mark(item, "long")) {
                m_counters->marked += 1;
            } else if (m_bands.dropsUncapable) {
                m_counters->droppedSelectively += 1;
                DropBeforeEnqueue(item, "long");
                return false;
            }
        }
        return GetInternalQueue(band)->Enqueue(item);
    }

    uint32_t BytesOf(size_t band) const {
        Ptr<InternalQueue> queue = GetInternalQueue(band);
        return queue->GetNBytes() + (m_device ? kLinkHeader * queue->GetNPackets() : 0);
    }

    size_t BandOf(Ptr<QueueDiscItem> item) const {
        Ptr<Ipv4QueueDiscItem> packet = DynamicCast<Ipv4QueueDiscItem>(item);
        const size_t band = packet ? packet->GetHeader().GetTos() >> 2 : 0;
        return std::min(band, m_bands.thresholds.size() - 1);
    }

    Ptr<QueueDiscItem> DoDequeue() override {
        for (size_t band = 0; band < GetNInternalQueues(); ++band) {
            if (Ptr<QueueDiscItem> item = GetInternalQueue(band)->Dequeue()) {
                return item;
            }
        }
        return nullptr;
    }

    bool CheckConfig() override {
        while (GetNInternalQueues() < m_bands.thresholds.size()) {
            // The limit is in DoEnqueue.
            AddInternalQueue(CreateObjectWithAttributes<DropTailQueue<QueueDiscItem>>(
                "MaxSize", QueueSizeValue(QueueSize("1000000p"))));
        }
        return true;
    }

    void InitializeParams() override {}

    uint32_t m_bytes = 0;
    Bands m_bands;
    Ptr<PointToPointNetDevice> m_device;
    Counters* m_counters = nullptr;
};

struct Shape {
    uint32_t leaves = 9;
    uint32_t spines = 4;
    uint32_t hostsPerLeaf = 16;
    uint64_t hostRate = 100'000'000'000;  // bit/s
    uint64_t coreRate = 400'000'000'000;  // bit/s
    uint64_t linkDelayNs = 2900;
    uint32_t bufferBytes = 512 << 10;
    Bands bands = {{65 * 1500}, false, false};
    bool perPacket = false;
    // In place of PortQueue, of so many bytes.
    std::function<Ptr<QueueDisc>(uint32_t, Counters*)> makeQueue;
    // Ports are no part of the hash: all that one host sends another takes one way.
    bool perPair = false;
    // See PortQueue::CountOnLink.
    bool countsOnLink = false;
};

constexpr uint32_t kUnlimited = 1U << 30;

inline Ipv4Address AddressOf(uint32_t host) { return Ipv4Address(0x0a000001U + host); }
inline uint32_t HostOf(Ipv4Address address) { return address.Get() - 0x0a000001U; }

// Scrambles 64 bits (SplitMix64).
inline uint64_t Mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
    return value ^ (value >> 31);
}

// The next hop by arithmetic. Interface 0 of every node is the loopback.
class Routing : public Ipv4RoutingProtocol {
  public:
    enum class Role { Host, Leaf, Spine };

    Routing(const Shape& shape, Role role, uint32_t number) : m_shape(shape), m_role(role), m_number(number) {}

    Ptr<Ipv4Route> RouteOutput(Ptr<Packet>, const Ipv4Header& header, Ptr<NetDevice>, Socket::SocketErrno& error) override {
        error = Socket::ERROR_NOTERROR;
        return Route(header, 1);
    }

    bool RouteInput(Ptr<const Packet> packet, const Ipv4Header& header, Ptr<const NetDevice> device, UnicastForwardCallback forward,
                    MulticastForwardCallback, LocalDeliverCallback local, ErrorCallback) override {
        if (m_role == Role::Host) {
            local(packet, header, m_ipv4->GetInterfaceForDevice(device));
            return true;
        }
        const uint32_t to = HostOf(header.GetDestination());
        const uint32_t leaf = to / m_shape.hostsPerLeaf;
        uint32_t interface = 0;
        if (m_role == Role::Spine) {
            interface = 1 + leaf;
        } else if (leaf == m_number) {
            interface = 1 + to % m_shape.hostsPerLeaf;
        } else {
            interface = 1 + m_shape.hostsPerLeaf + Spine(packet, header);
        }
        forward(Route(header, interface), packet, header);
        return true;
    }

    void NotifyInterfaceUp(uint32_t) override {}
    void NotifyInterfaceDown(uint32_t) override {}
    void NotifyAddAddress(uint32_t, Ipv4InterfaceAddress) override {}
    void NotifyRemoveAddress(uint32_t, Ipv4InterfaceAddress) override {}
    void SetIpv4(Ptr<Ipv4> ipv4) override { m_ipv4 = ipv4; }
    void PrintRoutingTable(Ptr<OutputStreamWrapper>, Time::Unit) const override {}

  private:
    Ptr<Ipv4Route> Route(const Ipv4Header& header, uint32_t interface) {
        Ptr<Ipv4Route> route = Create<Ipv4Route>();
        route->SetDestination(header.GetDestination());
        route->SetGateway(header.GetDestination());
        route->SetSource(m_role == Role::Host ? AddressOf(m_number) : header.GetSource());
        route->SetOutputDevice(m_ipv4->GetNetDevice(interface));
        return route;
    }

    uint32_t Spine(Ptr<const Packet> packet, const Ipv4Header& header) {
        if (PathTag chosen; packet->PeekPacketTag(chosen)) {
            return chosen.spine % m_shape.spines;
        }
        if (m_shape.perPacket) {
            return m_random->GetInteger(0, m_shape.spines - 1);
        }
        if (m_shape.perPair) {
            return Mix(uint64_t{HostOf(header.GetSource())} << 40 | uint64_t{HostOf(header.GetDestination())} << 8) % m_shape.spines;
        }
        uint8_t ports[4] = {0, 0, 0, 0};
        packet->CopyData(ports, sizeof ports);
        const uint64_t hosts = uint64_t{header.GetSource().Get()} << 32 | header.GetDestination().Get();
        const uint64_t flow = uint64_t{ports[0]} << 24 | ports[1] << 16 | ports[2] << 8 | ports[3];
        return Mix(Mix(hosts) ^ flow) % m_shape.spines;
    }

    Shape m_shape;
    Role m_role;
    uint32_t m_number;
    Ptr<Ipv4> m_ipv4;
    Ptr<UniformRandomVariable> m_random = CreateObject<UniformRandomVariable>();
};

// Nodes, links and queues. Every switch port has a PortQueue; a host's own queue is as long as its sockets make it.
class Network {
  public:
    explicit Network(const Shape& shape) : m_shape(shape) {
        Config::SetDefault("ns3::DropTailQueue<Packet>::MaxSize", QueueSizeValue(QueueSize("1p")));
        hosts.Create(shape.leaves * shape.hostsPerLeaf);
        m_leaves.Create(shape.leaves);
        m_spines.Create(shape.spines);
        Install(hosts, Routing::Role::Host);
        Install(m_leaves, Routing::Role::Leaf);
        Install(m_spines, Routing::Role::Spine);
        // The order in which a node's links are made is the order of its interfaces.
        for (uint32_t host = 0; host < hosts.GetN(); ++host) {
            Link(hosts.Get(host), m_leaves.Get(host / shape.hostsPerLeaf), shape.hostRate);
            Ptr<Ipv4> ipv4 = hosts.Get(host)->GetObject<Ipv4>();
            ipv4->AddAddress(1, Ipv4InterfaceAddress(AddressOf(host), Ipv4Mask("255.255.255.255")));
        }
        for (uint32_t leaf = 0; leaf < shape.leaves; ++leaf) {
            for (uint32_t spine = 0; spine < shape.spines; ++spine) {
                Link(m_leaves.Get(leaf), m_spines.Get(spine), shape.coreRate);
            }
        }
    }

    uint64_t HostRate() const { return m_shape.hostRate; }
    uint32_t Spines() const { return m_shape.spines; }

    NodeContainer hosts;
    Counters counters;
    // What each host has not sent yet.
    std::vector<Ptr<PortQueue>> nics;

  private:
    void Install(NodeContainer nodes, Routing::Role role) {
        InternetStackHelper stack;
        stack.SetIpv6StackInstall(false);
        for (uint32_t number = 0; number < nodes.GetN(); ++number) {
            stack.Install(nodes.Get(number));
            nodes.Get(number)->GetObject<Ipv4>()->SetRoutingProtocol(Create<Routing>(m_shape, role, number));
        }
    }

    void Link(Ptr<Node> a, Ptr<Node> b, uint64_t rate) {
        PointToPointHelper link;
        link.SetDeviceAttribute("DataRate", DataRateValue(DataRate(rate)));
        link.SetChannelAttribute("Delay", TimeValue(NanoSeconds(m_shape.linkDelayNs)));
        NetDeviceContainer devices = link.Install(a, b);
        for (uint32_t end = 0; end < 2; ++end) {
            Ptr<NetDevice> device = devices.Get(end);
            Ptr<Node> node = device->GetNode();
            Ptr<Ipv4> ipv4 = node->GetObject<Ipv4>();
            const uint32_t interface = ipv4->AddInterface(device);
            ipv4->SetUp(interface);
            const bool isHost = end == 0 && rate == m_shape.hostRate && node->GetId() < hosts.GetN();
            Ptr<QueueDisc> queue = MakeQueue(isHost);
            Ptr<TrafficControlLayer> layer = node->GetObject<TrafficControlLayer>();
            if (m_shape.countsOnLink) {
                DynamicCast<PortQueue>(queue)->CountOnLink(DynamicCast<PointToPointNetDevice>(device));
            }
            layer->SetRootQueueDiscOnDevice(device, queue);
            layer->ScanDevices();
        }
    }

    Ptr<QueueDisc> MakeQueue(bool isHost) {
        if (m_shape.makeQueue) {
            return m_shape.makeQueue(isHost ? kUnlimited : m_shape.bufferBytes, &counters);
        }
        Ptr<PortQueue> queue = CreateObject<PortQueue>();
        if (isHost) {
            nics.push_back(queue);
            const std::vector<uint32_t> thresholds(m_shape.bands.thresholds.size(), kUnlimited);
            queue->Set(kUnlimited, {thresholds, false, false}, &counters);
        } else {
            queue->Set(m_shape.bufferBytes, m_shape.bands, &counters);
        }
        return queue;
    }

    Shape m_shape;
    NodeContainer m_leaves;
    NodeContainer m_spines;
};

}  // namespace fabric
