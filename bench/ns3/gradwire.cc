// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The burst over gradwire: every host has a rank of the product behind its C interface, and one UDP socket. Settings of the ranks,
// beginning, and what counts as the time of a transfer are those of `gradwire-sim burst`, so that the two simulators can be compared:
// a push takes from its worker's call to the receiver's first word that it is over, a pull from the end of the last push to its server.
// A packet takes 12 bytes less on the links here than on those of Ethernet: `gradwire-sim burst --header-bytes 30`.

#include "burst.h"

#include "gradwire.h"

#include <chrono>
#include <map>
#include <memory>
#include <tuple>

using namespace ns3;
using burst::Settings;

namespace {

constexpr uint16_t kPort = 4000;
constexpr uint32_t kSettleNs = 2'000'000;
// What a host hands to its network card ahead of time: the plan of `gradwire-sim burst` has the same.
constexpr uint32_t kNicBytes = 64 << 10;

uint64_t Now() { return Simulator::Now().GetNanoSeconds(); }

void Check(int32_t code, const char* what) { NS_ABORT_MSG_IF(code < 0, "gradwire refused " << what << ": " << code); }

// The generator of `gradwire-sim` (SplitMix64), so that gradients and start times are the same in both.
class Random {
  public:
    Random(uint64_t seed, uint64_t label) : m_state(fabric::Mix(seed ^ fabric::Mix(label + kGolden))) {}

    double Unit() { return static_cast<double>(Draw() >> 11) / static_cast<double>(uint64_t{1} << 53); }
    uint64_t UpTo(uint64_t most) { return Draw() % (most + 1); }

  private:
    uint64_t Draw() {
        m_state += kGolden;
        return fabric::Mix(m_state);
    }

    static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
    uint64_t m_state;
};

// When transfers began and ended, read off the datagrams that hosts send.
class FlowLog {
  public:
    void OnSent(uint32_t from, uint32_t to, const uint8_t* head, size_t length, size_t payload) {
        GradwireDatagram datagram;
        if (gradwire_describe(head, length, &datagram) != GRADWIRE_OK) {
            return;
        }
        if (datagram.opens != 0 && payload > 0) {
            m_open.emplace(std::make_tuple(from, to, datagram.transfer), Flow{from, to, datagram.index, Now(), 0});
        } else if (datagram.closes != 0) {
            auto found = m_open.find({to, from, datagram.transfer});
            if (found != m_open.end() && found->second.ended == 0) {
                found->second.ended = Now();
            }
        }
    }

    // Microseconds of all pushes, called for at `called`, and of all pulls.
    std::pair<std::vector<double>, std::vector<double>> Times(const std::vector<uint64_t>& called) const {
        std::map<uint32_t, uint64_t> ready;
        for (const auto& [key, flow] : m_open) {
            if (flow.index == 0) {
                ready[flow.to] = std::max(ready[flow.to], flow.ended);
            }
        }
        std::pair<std::vector<double>, std::vector<double>> times;
        for (const auto& [key, flow] : m_open) {
            if (flow.ended > 0 && flow.index < 2) {
                const uint64_t since = flow.index == 0 ? called[flow.from] : ready[flow.from];
                (flow.index == 0 ? times.first : times.second).push_back((flow.ended - since) / 1000.0);
            }
        }
        return times;
    }

  private:
    struct Flow {
        uint32_t from;
        uint32_t to;
        uint32_t index;
        uint64_t began;
        uint64_t ended;
    };

    std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Flow> m_open;
};

class Burst;

class Host {
  public:
    Host(Burst& burst, const GradwireConfig& config, uint32_t place);
    ~Host() { gradwire_rank_free(m_rank); }
    Host(const Host&) = delete;

    void Call(std::vector<float>& input);
    // The drain contract: events, then datagrams, then the timer.
    void Drain();
    void OnTimer();

    GradwireEvent report = {};

  private:
    static int32_t HasRoom(void* self);
    static void Push(void* self, uint32_t to, uint32_t band, int32_t ecn, const uint8_t* head, size_t headBytes,
                     const uint8_t* payload, size_t payloadBytes);
    void OnReceive(Ptr<Socket> socket);
    void OnLeft();
    // Bytes that wait for the link: the device keeps a packet of its own.
    uint32_t Waiting() const { return m_nic->GetNBytes() + m_device->GetQueue()->GetNBytes(); }
    void Arm();

    Burst& m_burst;
    uint32_t m_number;
    Ptr<fabric::PortQueue> m_nic;
    Ptr<PointToPointNetDevice> m_device;
    GradwireRank* m_rank;
    Ptr<Socket> m_socket;
    EventId m_timer;
    uint64_t m_due = UINT64_MAX;
    bool m_waits = false;
    std::vector<float> m_output;
    std::vector<uint8_t> m_bytes;
};

class Burst {
  public:
    Burst(const Settings& settings, fabric::Network& network, const std::string& preset, int controller)
        : settings(settings), network(network) {
        for (int servers = 0; servers < 2; ++servers) {
            for (uint32_t host = 0; host < settings.hosts; ++host) {
                if (burst::IsServer(settings, host) == (servers == 1)) {
                    places.push_back(host);
                }
            }
        }
        ranks.resize(settings.hosts);
        for (uint32_t rank = 0; rank < places.size(); ++rank) {
            ranks[places[rank]] = rank;
        }
        const uint32_t servers = burst::ServersOf(settings);
        m_workers = settings.hosts - servers;
        for (uint32_t rank = 0; rank < places.size(); ++rank) {
            GradwireConfig config;
            Check(gradwire_config_default(preset.c_str(), rank, m_workers, servers, &config), "the preset");
            config.controller = controller < 0 ? config.controller : controller;
            hosts.push_back(std::make_unique<Host>(*this, config, places[rank]));
        }
        called.resize(places.size());
        // As in `cluster/losses.rs`: stretches of unlike scale, triangles about zero.
        Random random(settings.seed, 2);
        m_input.resize(settings.bytes / 4);
        double scale = 0;
        for (size_t elem = 0; elem < m_input.size(); ++elem) {
            scale = elem % 4096 == 0 ? std::pow(10, -4 + 2 * random.Unit()) : scale;
            const double first = random.Unit();
            m_input[elem] = static_cast<float>(scale * (first - random.Unit()));
        }
    }

    void Start() {
        for (auto& host : hosts) {
            host->Drain();
        }
    }

    void OnConnected() {
        m_connected += 1;
        if (m_connected == hosts.size()) {
            Simulator::Schedule(NanoSeconds(kSettleNs), &Burst::CallAll, this);
        }
    }

    void OnDone() {
        m_done += 1;
        if (m_done == m_workers) {
            m_stepUs = (Now() - m_began) / 1000.0;
            Simulator::Stop(MicroSeconds(10));
        }
    }

    void Print(const std::string& preset, double wall) {
        auto [pushes, pulls] = flows.Times(called);
        std::vector<double> all = pushes;
        all.insert(all.end(), pulls.begin(), pulls.end());
        uint64_t uncounted = 0;
        for (uint32_t rank = 0; rank < m_workers; ++rank) {
            uncounted += hosts[rank]->report.elems_uncounted;
        }
        std::printf("{\"simulator\": \"ns-3\", \"transport\": \"%s\", \"hosts\": %u, \"servers\": %u, \"bytes\": %lu, "
                    "\"oversubscription\": %g, \"unfinished\": %u, ",
                    preset.c_str(), settings.hosts, burst::ServersOf(settings), settings.bytes, settings.oversubscription,
                    m_workers - m_done);
        burst::PrintTimes("flows", all);
        burst::PrintTimes("pushes", pushes);
        burst::PrintTimes("pulls", pulls);
        std::printf("\"step_us\": %.3f, \"lost_share\": %.6f, \"overflowed\": %lu, \"dropped_selectively\": %lu, "
                    "\"marked\": %lu, \"events\": %lu, \"wall_s\": %.2f}\n",
                    m_stepUs, static_cast<double>(uncounted) / (static_cast<double>(m_input.size()) * m_workers),
                    network.counters.overflowed, network.counters.droppedSelectively, network.counters.marked,
                    Simulator::GetEventCount(), wall);
    }

    const Settings& settings;
    fabric::Network& network;
    FlowLog flows;
    std::vector<uint32_t> places;
    std::vector<uint32_t> ranks;
    std::vector<std::unique_ptr<Host>> hosts;
    std::vector<uint64_t> called;

  private:
    void CallAll() {
        m_began = Now();
        Random random(settings.seed, 4);
        for (uint32_t rank = 0; rank < m_workers; ++rank) {
            const uint64_t late = random.UpTo(static_cast<uint64_t>(settings.jitterUs * 1000));
            Simulator::Schedule(NanoSeconds(late), [this, rank] {
                called[rank] = Now();
                hosts[rank]->Call(m_input);
            });
        }
    }

    uint32_t m_workers = 0;
    size_t m_connected = 0;
    uint32_t m_done = 0;
    uint64_t m_began = 0;
    double m_stepUs = 0;
    std::vector<float> m_input;
};

Host::Host(Burst& burst, const GradwireConfig& config, uint32_t place)
    : m_burst(burst), m_number(config.rank), m_nic(burst.network.nics[place]), m_rank(gradwire_rank_new(&config, Now())) {
    NS_ABORT_MSG_IF(m_rank == nullptr, "gradwire refused the settings");
    m_socket = Socket::CreateSocket(burst.network.hosts.Get(place), UdpSocketFactory::GetTypeId());
    m_socket->Bind(InetSocketAddress(Ipv4Address::GetAny(), kPort));
    m_socket->SetAttribute("RcvBufSize", UintegerValue(1U << 30));
    m_socket->SetIpRecvTos(true);
    m_socket->SetRecvCallback(MakeCallback(&Host::OnReceive, this));
    Ptr<NetDevice> device = burst.network.hosts.Get(place)->GetObject<Ipv4>()->GetNetDevice(1);
    m_device = DynamicCast<PointToPointNetDevice>(device);
    // When the next packet is on the link, which is behind this trace.
    auto onLeft = [this](Ptr<const Packet>) {
        if (m_waits) {
            Simulator::ScheduleNow(&Host::OnLeft, this);
        }
    };
    device->TraceConnectWithoutContext("PhyTxEnd", Callback<void, Ptr<const Packet>>(onLeft));
}

void Host::Call(std::vector<float>& input) {
    m_output.resize(input.size());
    uint64_t call = 0;
    Check(gradwire_all_reduce(m_rank, Now(), input.data(), m_output.data(), input.size(), &call), "a call");
    Drain();
}

void Host::Drain() {
    GradwireEvent event;
    while (gradwire_poll_event(m_rank, &event) == GRADWIRE_OK) {
        NS_ABORT_MSG_IF(event.kind == 3 || event.kind == 4, "rank " << m_number << " failed");
        if (event.kind == 1) {
            m_burst.OnConnected();
        } else if (event.kind == 2) {
            report = event;
            m_burst.OnDone();
        }
    }
    const GradwireSink sink = {this, &Host::HasRoom, &Host::Push};
    Check(gradwire_poll_transmit(m_rank, Now(), &sink), "to send");
    m_waits = HasRoom(this) == 0;
    Arm();
}

void Host::Arm() {
    uint64_t due = gradwire_poll_timeout(m_rank);
    if (m_waits && due <= Now()) {
        due = UINT64_MAX;
    }
    if (due == m_due) {
        return;
    }
    m_due = due;
    m_timer.Cancel();
    if (due < UINT64_MAX) {
        m_timer = Simulator::Schedule(NanoSeconds(std::max(due, Now()) - Now()), &Host::OnTimer, this);
    }
}

void Host::OnTimer() {
    m_due = UINT64_MAX;
    Check(gradwire_handle_timeout(m_rank, Now()), "a timeout");
    Drain();
}

void Host::OnLeft() {
    if (m_waits && Waiting() <= kNicBytes / 2) {
        m_waits = false;
        Check(gradwire_handle_timeout(m_rank, Now()), "a timeout");
        Drain();
    }
}

void Host::OnReceive(Ptr<Socket> socket) {
    Address from;
    while (Ptr<Packet> packet = socket->RecvFrom(from)) {
        SocketIpTosTag tos;
        const uint32_t ecn = packet->RemovePacketTag(tos) ? tos.GetTos() & 3 : 0;
        m_bytes.resize(packet->GetSize());
        packet->CopyData(m_bytes.data(), m_bytes.size());
        const uint32_t sender = m_burst.ranks[fabric::HostOf(InetSocketAddress::ConvertFrom(from).GetIpv4())];
        Check(gradwire_handle_datagram(m_rank, Now(), sender, ecn, m_bytes.data(), m_bytes.size()), "a datagram");
        Drain();
    }
}

int32_t Host::HasRoom(void* self) { return static_cast<Host*>(self)->Waiting() < kNicBytes ? 1 : 0; }

void Host::Push(void* self, uint32_t to, uint32_t band, int32_t ecn, const uint8_t* head, size_t headBytes, const uint8_t* payload,
                size_t payloadBytes) {
    Host& host = *static_cast<Host*>(self);
    host.m_burst.flows.OnSent(host.m_number, to, head, headBytes, payloadBytes);
    std::vector<uint8_t> bytes(head, head + headBytes);
    bytes.insert(bytes.end(), payload, payload + payloadBytes);
    Ptr<Packet> packet = Create<Packet>(bytes.data(), bytes.size());
    SocketIpTosTag tos;
    tos.SetTos(static_cast<uint8_t>(band << 2 | (ecn != 0 ? 2 : 0)));
    packet->AddPacketTag(tos);
    host.m_socket->SendTo(packet, 0, InetSocketAddress(fabric::AddressOf(host.m_burst.places[to]), kPort));
}

// As `gradwire switch` sets up one class: control, data, others.
fabric::Bands BandsOfPreset() { return {{fabric::kUnlimited, 65 * 1500, fabric::kUnlimited}, true, false}; }

}  // namespace

int main(int argc, char* argv[]) {
    Settings settings;
    std::string preset = "auto";
    int controller = -1;
    CommandLine command("The burst over gradwire; prints one JSON object.");
    burst::AddTo(command, settings);
    command.AddValue("preset", "of the transport: auto, mlt, ...", preset);
    command.AddValue("controller", "0 bottleneck, 1 timely, 2 receiving rate; -1: the preset's", controller);
    command.Parse(argc, argv);
    RngSeedManager::SetSeed(settings.seed);
    fabric::Shape shape = burst::ShapeOf(settings);
    shape.perPair = true;
    shape.countsOnLink = true;
    shape.bands = BandsOfPreset();
    fabric::Network network(shape);
    Burst burst(settings, network, preset, controller);
    // Not at once: nodes are ready when the simulator runs.
    Simulator::ScheduleNow(&Burst::Start, &burst);
    const auto began = std::chrono::steady_clock::now();
    Simulator::Stop(Seconds(60));
    Simulator::Run();
    burst.Print(preset, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    Simulator::Destroy();
    return 0;
}
